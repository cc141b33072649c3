// Finding the files of a store's folder.
#pragma once

#include <string>
#include <vector>

namespace moeflux {

std::string absolute_path(const std::string& path);

// FOLDER/NAME; FormatError when there is no such file. Symbolic links are followed.
std::string required_file(const std::string& folder, const std::string& name);

// FormatError when there is no such folder.
void require_folder(const std::string& folder);

// What lies in a folder, in no order.
std::vector<std::string> names_in(const std::string& folder);

}  // namespace moeflux
