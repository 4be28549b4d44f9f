# cmake -D COMMAND=crossdock -D OUT=folder -P CommandTexts.cmake: man pages and completions, which the command prints.
function(write_text file)
  execute_process(COMMAND ${COMMAND} ${ARGN} OUTPUT_FILE ${OUT}/${file} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${COMMAND} ${ARGN}: ${status}")
  endif()
endfunction()

file(MAKE_DIRECTORY ${OUT}/man/man1 ${OUT}/bash-completion/completions ${OUT}/zsh/site-functions
     ${OUT}/fish/vendor_completions.d)
write_text(bash-completion/completions/crossdock completion bash)
write_text(zsh/site-functions/_crossdock completion zsh)
write_text(fish/vendor_completions.d/crossdock.fish completion fish)
write_text(man/man1/crossdock.1 man)
foreach(page run verify eval plan mesh bench info)
  write_text(man/man1/crossdock-${page}.1 man ${page})
endforeach()
