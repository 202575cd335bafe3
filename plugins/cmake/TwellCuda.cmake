# Finds nvcc: an installed CUDA toolkit, or else the one on PyPI.
include_guard(GLOBAL)
include(TwellWheels)

set(TWELL_CUDA auto CACHE STRING "Where nvcc comes from: auto (system, else wheels), system, wheels")
set_property(CACHE TWELL_CUDA PROPERTY STRINGS auto system wheels)
# Other GPUs than 9.0 compile the PTX of 8.0 when they first load the library.
set(TWELL_CUDA_ARCHS "80-virtual;90a-real" CACHE STRING "CUDA architectures to compile, or all")
# The architectures of `all`, as releases have them. Code for 8.0 runs on 8.6 and 8.9, too; PTX is for GPUs after 12.
set(TWELL_ALL_CUDA_ARCHS "80-real;80-virtual;90a-real;120-real")

# Knows sm_90a and accepts g++ 13. Before 12.8, sm_120 is left out with a warning.
set(TWELL_OLDEST_CUDA 12.4)
set(TWELL_CUDA_WHEELS nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
                      nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)

# Says in <result> why this nvcc cannot be used, or "" if it can.
function(_twell_judge_nvcc nvcc result)
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_QUIET RESULT_VARIABLE status)
    if(NOT status EQUAL 0 OR NOT version MATCHES "release ([0-9]+\\.[0-9]+)")
        set(${result} "it does not run" PARENT_SCOPE)
        return()
    endif()
    if(CMAKE_MATCH_1 VERSION_LESS TWELL_OLDEST_CUDA)
        set(${result} "it is CUDA ${CMAKE_MATCH_1}, older than ${TWELL_OLDEST_CUDA}" PARENT_SCOPE)
        return()
    endif()
    # A compiler alone, as the nvidia-cuda-nvcc wheel installs it, lacks headers and libraries. cuda_bf16.h needs CCCL.
    file(WRITE "${CMAKE_BINARY_DIR}/CMakeFiles/twell_probe.cu"
         "#include <cuda_bf16.h>\n#include <cuda_runtime.h>\nint main() { return 0; }\n")
    execute_process(
        COMMAND "${nvcc}" --cudart=static -o "${CMAKE_BINARY_DIR}/CMakeFiles/twell_probe"
                "${CMAKE_BINARY_DIR}/CMakeFiles/twell_probe.cu"
        RESULT_VARIABLE status
        OUTPUT_QUIET ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        string(STRIP "${output}" output)
        set(${result} "it cannot compile an empty program: ${output}" PARENT_SCOPE)
        return()
    endif()
    set(${result} "" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_COMPILER. To be called before enable_language(CUDA).
function(twell_find_nvcc)
    if(NOT TWELL_CUDA MATCHES "^(auto|system|wheels)$")
        message(FATAL_ERROR "TWELL_CUDA is '${TWELL_CUDA}'; allowed: auto, system, wheels")
    endif()
    if(CMAKE_CUDA_COMPILER)
        return() # a choice of the user's, or of an earlier configure run
    endif()

    set(refused "")
    if(NOT TWELL_CUDA STREQUAL "wheels")
        set(candidates "")
        if(DEFINED ENV{CUDACXX})
            list(APPEND candidates "$ENV{CUDACXX}")
        endif()
        foreach(root IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
            if(root)
                list(APPEND candidates "${root}/bin/nvcc")
            endif()
        endforeach()
        find_program(TWELL_NVCC_ON_PATH nvcc NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CACHE)
        if(TWELL_NVCC_ON_PATH)
            list(APPEND candidates "${TWELL_NVCC_ON_PATH}")
        endif()
        list(APPEND candidates /usr/local/cuda/bin/nvcc)
        list(REMOVE_DUPLICATES candidates)
        foreach(nvcc IN LISTS candidates)
            if(NOT EXISTS "${nvcc}")
                continue()
            endif()
            _twell_judge_nvcc("${nvcc}" fault)
            if(fault STREQUAL "")
                message(STATUS "nvcc: ${nvcc}")
                set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "CUDA compiler")
                return()
            endif()
            message(STATUS "Not using ${nvcc}: ${fault}")
            string(APPEND refused "\n  ${nvcc}: ${fault}")
        endforeach()
        if(TWELL_CUDA STREQUAL "system")
            message(FATAL_ERROR "No usable CUDA toolkit (${TWELL_OLDEST_CUDA} or newer). Set CUDACXX to its nvcc, or "
                                "TWELL_CUDA=wheels to install one from PyPI into the build folder.${refused}")
        endif()
    endif()

    set(folder "${CMAKE_BINARY_DIR}/wheels/cuda")
    twell_install_wheels(
        "${folder}" "the CUDA compiler"
        "Install a CUDA toolkit ${TWELL_OLDEST_CUDA} or newer and set CUDACXX to its nvcc, or give pip access to PyPI or a mirror.${refused}"
        ${TWELL_CUDA_WHEELS})
    set(root "${folder}/nvidia/cu13")
    # nvcc looks for the runtime library in lib64, and the wheels have lib.
    if(NOT EXISTS "${root}/lib64")
        file(CREATE_LINK lib "${root}/lib64" SYMBOLIC)
    endif()
    _twell_judge_nvcc("${root}/bin/nvcc" fault)
    if(NOT fault STREQUAL "")
        message(FATAL_ERROR "The nvcc installed from PyPI, ${root}/bin/nvcc, cannot be used: ${fault}")
    endif()
    message(STATUS "nvcc: ${root}/bin/nvcc")
    set(CMAKE_CUDA_COMPILER "${root}/bin/nvcc" CACHE FILEPATH "CUDA compiler")
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES to the requested ones that this nvcc knows.
macro(twell_choose_architectures)
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE _twell_known)
    set(CMAKE_CUDA_ARCHITECTURES "")
    set(_twell_wanted "${TWELL_CUDA_ARCHS}")
    if(_twell_wanted STREQUAL "all")
        set(_twell_wanted "${TWELL_ALL_CUDA_ARCHS}")
    endif()
    foreach(_twell_arch IN LISTS _twell_wanted)
        if(NOT _twell_arch MATCHES "^([0-9]+)([af]?)(-real|-virtual)?$")
            message(FATAL_ERROR "TWELL_CUDA_ARCHS: '${_twell_arch}' is no architecture; examples: 80, 90a-real; or all")
        endif()
        # Code for 120a does not run on 12.1, but launches would take it for code that does: see launch.cuh.
        if(CMAKE_MATCH_2 AND NOT "${CMAKE_MATCH_1}${CMAKE_MATCH_2}" STREQUAL "90a")
            message(FATAL_ERROR "TWELL_CUDA_ARCHS: '${_twell_arch}' has a letter, but of the kernels only those for 90a "
                                "need one; write ${CMAKE_MATCH_1} without it")
        endif()
        if(_twell_known MATCHES "compute_${CMAKE_MATCH_1}[\r\n]")
            list(APPEND CMAKE_CUDA_ARCHITECTURES "${_twell_arch}")
        else()
            message(WARNING "CUDA ${CMAKE_CUDA_COMPILER_VERSION} does not know architecture ${_twell_arch}: left out. "
                            "TWELL_CUDA=wheels takes a newer nvcc from PyPI.")
        endif()
    endforeach()
    # The host has kernels for 90a called, and either code may be taken.
    if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-real)?(;|$)" AND CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a")
        message(FATAL_ERROR "TWELL_CUDA_ARCHS: leave out 90, for which there is faster code in 90a")
    endif()
    if(NOT CMAKE_CUDA_ARCHITECTURES)
        message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION} knows none of the architectures ${TWELL_CUDA_ARCHS}")
    endif()
    message(STATUS "CUDA architectures: ${CMAKE_CUDA_ARCHITECTURES}")
endmacro()
