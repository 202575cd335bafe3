# twell_install_wheels(<folder> <what> <hint> <requirement>...)
#
# Installs PyPI wheels, without their dependencies, into a folder of the build tree, once. `what` and `hint` go into the
# message of a failure: what was wanted, and what to set to do without it.
function(twell_install_wheels folder what hint)
    twell_try_to_install_wheels("${folder}" "${what}" fault ${ARGN})
    if(fault)
        list(JOIN ARGN " " printed)
        message(FATAL_ERROR "Could not install ${what} from PyPI (${printed}).\n${hint}\n${fault}")
    endif()
endfunction()

# twell_try_to_install_wheels(<folder> <what> <result> <requirement>...)
#
# The same, but says in <result> why it failed, or "" if it did not.
function(twell_try_to_install_wheels folder what result)
    set(${result} "" PARENT_SCOPE)
    set(stamp "${folder}/requirements.txt")
    list(JOIN ARGN "\n" requirements)
    if(EXISTS "${stamp}")
        file(READ "${stamp}" installed)
        if(installed STREQUAL requirements)
            return()
        endif()
    endif()

    find_package(Python 3.9 QUIET REQUIRED COMPONENTS Interpreter)
    list(JOIN ARGN " " printed)
    message(STATUS "Installing ${what} from PyPI: ${printed}")
    file(REMOVE_RECURSE "${folder}")
    # Settings that would send the files elsewhere belong to the outer pip, if one runs this build.
    execute_process(
        COMMAND "${CMAKE_COMMAND}" -E env --unset=PIP_TARGET --unset=PIP_PREFIX --unset=PIP_ROOT --unset=PIP_USER
                "${Python_EXECUTABLE}" -m pip install --quiet --disable-pip-version-check --no-input --no-deps
                --no-compile --only-binary=:all: --target "${folder}" ${ARGN}
        RESULT_VARIABLE status
        OUTPUT_VARIABLE output
        ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        string(STRIP "${output}" output)
        set(${result} "${Python_EXECUTABLE} -m pip said:\n${output}" PARENT_SCOPE)
        return()
    endif()
    file(WRITE "${stamp}" "${requirements}")
endfunction()
