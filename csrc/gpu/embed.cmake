# The kernels' files of a GPU as a C++ file: cmake -DOUT=file -DNAME=metal -DFILES=a.metal,b.h -P embed.cmake
string(REPLACE "," ";" files "${FILES}")
set(rows "")
set(count 0)
foreach(path IN LISTS files)
  get_filename_component(name ${path} NAME)
  file(READ ${path} text)
  string(APPEND rows "    {\"${name}\", R\"kernels(${text})kernels\"},\n")
  math(EXPR count "${count} + 1")
endforeach()
file(WRITE ${OUT} "#include <array>\n\n#include \"gpu/kernel_text.h\"\n\nnamespace moeflux::gpu {\nnamespace {\n\n"
                  "constexpr std::array<EmbeddedFile, ${count}> ${NAME}_rows = {{\n${rows}}};\n\n"
                  "}  // namespace\n\nstd::span<const EmbeddedFile> ${NAME}_files() { return ${NAME}_rows; }\n\n"
                  "}  // namespace moeflux::gpu\n")
