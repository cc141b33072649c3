# Writes OUT, the C++ file that holds the commit SOURCE is at, when it has changed since the last build.
find_program(GIT git)
set(commit unknown)
if(GIT)
  execute_process(COMMAND ${GIT} rev-parse --short=12 HEAD WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE found
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit ${found})
    execute_process(COMMAND ${GIT} diff --quiet HEAD -- csrc cuda metal bench CMakeLists.txt WORKING_DIRECTORY ${SOURCE}
                    ERROR_QUIET RESULT_VARIABLE differs)
    if(differs)
      string(APPEND commit +)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#include \"moeflux.h\"\n\nconst char* const moeflux::commit = \"@commit@\";\n" @ONLY)
