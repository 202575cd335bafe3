# Finds the headers of cuDNN 9 and of cuDNN's front end. Only headers: cuDNN itself is opened at run time.
include_guard(GLOBAL)
include(TwellWheels)

set(TWELL_CUDNN auto CACHE STRING "Whether the attention plugin is built: auto (if cuDNN's headers can be had), off")
set_property(CACHE TWELL_CUDNN PROPERTY STRINGS auto off)
set(CUDNN_ROOT "$ENV{CUDNN_ROOT}" CACHE PATH "cuDNN installation whose include/ is used")

# The front end is what the code was written for; it serves every cuDNN 9 at run time, whatever headers it was compiled
# with.
set(TWELL_OLDEST_CUDNN 9.0)
set(TWELL_OLDEST_CUDNN_FRONTEND 1.32)
set(TWELL_CUDNN_WHEEL nvidia-cudnn-jit-cu13==9.27.0.42)
set(TWELL_CUDNN_FRONTEND_WHEEL nvidia-cudnn-frontend==1.32.0)

# Sets <result> to the first of the folders whose file <header> names a version "<major>.<minor>" in macros that begin
# with <prefix>, not older than <oldest>, of the same major; else to "".
function(_twell_find_versioned header prefix oldest result)
    string(REGEX MATCH "^[0-9]+" wanted "${oldest}")
    set(${result} "" PARENT_SCOPE)
    foreach(folder IN LISTS ARGN)
        if(NOT EXISTS "${folder}/${header}")
            continue()
        endif()
        file(STRINGS "${folder}/${header}" lines REGEX "#define ${prefix}_(MAJOR|MINOR)")
        string(REGEX MATCH "${prefix}_MAJOR[A-Z_]* +([0-9]+)" _ "${lines}")
        set(major "${CMAKE_MATCH_1}")
        string(REGEX MATCH "${prefix}_MINOR[A-Z_]* +([0-9]+)" _ "${lines}")
        set(version "${major}.${CMAKE_MATCH_1}")
        if(major EQUAL wanted AND version VERSION_GREATER_EQUAL oldest)
            set(${result} "${folder}" PARENT_SCOPE)
            return()
        endif()
        message(STATUS "Not using ${folder}/${header}: version ${version}; needed: ${oldest} or newer, below "
                       "the next major version")
    endforeach()
endfunction()

# Sets <result> to the include folders, or to "" if the attention plugin is not to be built.
function(twell_find_cudnn_headers result)
    set(${result} "" PARENT_SCOPE)
    if(NOT TWELL_CUDNN MATCHES "^(auto|off)$")
        message(FATAL_ERROR "TWELL_CUDNN is '${TWELL_CUDNN}'; allowed: auto, off")
    endif()
    if(TWELL_CUDNN STREQUAL "off")
        return()
    endif()

    # A cuDNN that torch brought comes after an installed one, and before a download. One that was downloaded stays, so
    # that a second build in a fresh environment compiles nothing anew.
    set(wheels "${CMAKE_BINARY_DIR}/wheels")
    find_package(Python 3.9 QUIET REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
                    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE)
    set(system /usr/local/include /usr/include /usr/include/${CMAKE_LIBRARY_ARCHITECTURE})
    if(CUDNN_ROOT)
        list(PREPEND system "${CUDNN_ROOT}/include")
    endif()
    set(downloaded "${wheels}/cudnn/nvidia/cudnn_jit/include")
    _twell_find_versioned(cudnn_version.h CUDNN ${TWELL_OLDEST_CUDNN} cudnn ${system} "${downloaded}"
                          "${packages}/nvidia/cudnn/include" "${packages}/nvidia/cudnn_jit/include")
    _twell_find_versioned(
        cudnn_frontend_version.h CUDNN_FRONTEND ${TWELL_OLDEST_CUDNN_FRONTEND} frontend ${system} "${packages}/include")

    set(fault "")
    if(NOT frontend)
        twell_try_to_install_wheels("${wheels}/cudnn_frontend" "the headers of cuDNN's front end" fault
                                    ${TWELL_CUDNN_FRONTEND_WHEEL})
        set(frontend "${wheels}/cudnn_frontend/include")
    endif()
    if(NOT fault AND NOT cudnn)
        twell_try_to_install_wheels("${wheels}/cudnn" "the headers of cuDNN" fault ${TWELL_CUDNN_WHEEL})
        set(cudnn "${downloaded}")
    endif()
    if(fault)
        message(STATUS "Without the attention plugin: there are no headers of cuDNN 9 (set CUDNN_ROOT), and they "
                       "cannot be installed from PyPI. ${fault}")
        return()
    endif()
    message(STATUS "cuDNN headers: ${cudnn}, ${frontend}")
    set(${result} "${cudnn}" "${frontend}" PARENT_SCOPE)
endfunction()
