# Finds the headers of TensorRT 10 or newer. Only headers: the plugins do not link against TensorRT.
include_guard(GLOBAL)
include(TwellWheels)

set(TENSORRT_ROOT "$ENV{TENSORRT_ROOT}" CACHE PATH "TensorRT installation whose include/ is used")

# Sets <result> to the include folder.
function(twell_find_tensorrt_headers result)
    # TensorRT 8 and 9, still found on many machines, know no IPluginV3.
    set(needed NvInferPluginBase.h)
    if(TENSORRT_ROOT)
        if(NOT EXISTS "${TENSORRT_ROOT}/include/${needed}")
            message(FATAL_ERROR "TENSORRT_ROOT is '${TENSORRT_ROOT}', but '${TENSORRT_ROOT}/include' holds no headers "
                                "of TensorRT 10 or newer (${needed})")
        endif()
        set(found "${TENSORRT_ROOT}/include")
    else()
        find_path(found ${needed} PATHS /usr/local/tensorrt/include /usr/include/${CMAKE_LIBRARY_ARCHITECTURE}
                  NO_CACHE)
    endif()
    if(NOT found)
        # The package is a project of its own; nothing of it but these Apache-2.0 headers is used.
        set(folder "${CMAKE_BINARY_DIR}/wheels/tensorrt")
        twell_install_wheels(
            "${folder}" "the TensorRT headers"
            "Set TENSORRT_ROOT to a TensorRT 10 or newer installation, or give pip access to PyPI or a mirror."
            kernel-lens==2.0.1)
        set(found "${folder}/kernel_lens/include/tensorrt")
    endif()
    message(STATUS "TensorRT headers: ${found}")
    set(${result} "${found}" PARENT_SCOPE)
endfunction()
