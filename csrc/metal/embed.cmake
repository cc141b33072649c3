# The files of metal/ as a C++ file: cmake -DOUT=file -DFILES=a.metal,b.h -P embed.cmake
string(REPLACE "," ";" files "${FILES}")
set(rows "")
set(count 0)
foreach(path IN LISTS files)
  get_filename_component(name ${path} NAME)
  file(READ ${path} text)
  string(APPEND rows "    {\"${name}\", R\"shader(${text})shader\"},\n")
  math(EXPR count "${count} + 1")
endforeach()
file(WRITE ${OUT} "#include \"metal/shaders.h\"\n\nnamespace moeflux::metal {\n\n"
                  "const EmbeddedFile embedded_files[] = {\n${rows}};\nconst size_t embedded_file_count = ${count};\n\n"
                  "}  // namespace moeflux::metal\n")
