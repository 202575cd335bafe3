# Finds the headers of TensorRT 10.3 or newer. Only headers: the plugins do not link against TensorRT.
include_guard(GLOBAL)
include(TwellWheels)

set(TENSORRT_ROOT "$ENV{TENSORRT_ROOT}" CACHE PATH "TensorRT installation whose include/ is used")

# Older ones, still found on many machines, know no plugins whose outputs are in the memory of their inputs. The version
# macro does not tell: RTX counts anew.
function(_twell_judge_headers folder result)
    file(GLOB headers "${folder}/NvInferRuntime*.h")
    set(${result} FALSE PARENT_SCOPE)
    foreach(header IN LISTS headers)
        file(STRINGS "${header}" found REGEX "^using IPluginV3OneBuildV2 " LIMIT_COUNT 1)
        if(found)
            set(${result} TRUE PARENT_SCOPE)
        endif()
    endforeach()
endfunction()

# Sets <result> to the include folder.
function(twell_find_tensorrt_headers result)
    if(TENSORRT_ROOT)
        set(found "${TENSORRT_ROOT}/include")
        _twell_judge_headers("${found}" good)
        if(NOT good)
            message(FATAL_ERROR "TENSORRT_ROOT is '${TENSORRT_ROOT}', but '${found}' holds no headers of TensorRT 10.3 "
                                "or newer (no IPluginV3OneBuildV2 in NvInferRuntime*.h)")
        endif()
    else()
        find_path(found NvInferRuntime.h PATHS /usr/local/tensorrt/include /usr/include/${CMAKE_LIBRARY_ARCHITECTURE}
                  NO_CACHE)
        if(found)
            _twell_judge_headers("${found}" good)
            if(NOT good)
                message(STATUS "Not using the TensorRT headers in ${found}: older than TensorRT 10.3")
                set(found "")
            endif()
        endif()
    endif()
    if(NOT found)
        # The package is a separate project; only these Apache-2.0 headers of it are used.
        set(folder "${CMAKE_BINARY_DIR}/wheels/tensorrt")
        twell_install_wheels(
            "${folder}" "the TensorRT headers"
            "Set TENSORRT_ROOT to a TensorRT 10.3 or newer installation, or give pip access to PyPI or a mirror."
            kernel-lens==2.0.1)
        set(found "${folder}/kernel_lens/include/tensorrt")
    endif()
    message(STATUS "TensorRT headers: ${found}")
    set(${result} "${found}" PARENT_SCOPE)
endfunction()
