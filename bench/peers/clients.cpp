// The clients of over_http.py, which are not what is measured: they read what has come, look for its end, and do
// nothing else.
//
//   clients PORT REQUEST...     sends each file on a connection of its own, and reads that until its last chunk
//
// Prints the tokens that the answers have, the seconds until the last of them ended, those of a processor that this
// took, and how many times something was read.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr size_t tail = 2048;  // of an answer, which has its usage

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

int asked(uint16_t port, const std::string& request) {
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connection < 0 || connect(connection, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) fail("connect");
  for (size_t sent = 0; sent < request.size();) {
    const ssize_t count = send(connection, request.data() + sent, request.size() - sent, 0);
    if (count < 0) fail("send");
    sent += static_cast<size_t>(count);
  }
  return connection;
}

long tokens_of(const std::string& text) {
  const std::string name = "\"completion_tokens\":";
  const size_t at = text.rfind(name);
  if (at == std::string::npos) {
    std::fprintf(stderr, "usage: expected at the end of an answer, found %s\n", text.c_str());
    std::exit(1);
  }
  return std::strtol(text.c_str() + at + name.size(), nullptr, 10);
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const auto port = static_cast<uint16_t>(std::atoi(words[1]));
  std::vector<std::string> requests;
  for (int i = 2; i < count; ++i) {
    std::ifstream file(words[i], std::ios::binary);
    requests.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const auto began = std::chrono::steady_clock::now();
  std::vector<pollfd> waiting;
  for (const std::string& request : requests) waiting.push_back({asked(port, request), POLLIN, 0});
  std::vector<std::string> texts(waiting.size());
  std::vector<char> part(1 << 16);
  long tokens = 0, reads = 0;
  for (size_t left = waiting.size(); left > 0;) {
    if (poll(waiting.data(), static_cast<nfds_t>(waiting.size()), -1) < 0) fail("poll");
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (!waiting[i].revents) continue;
      const ssize_t size = recv(waiting[i].fd, part.data(), part.size(), 0);
      if (size <= 0) fail("recv: expected the rest of an answer");
      ++reads;
      std::string& text = texts[i];
      text.append(part.data(), static_cast<size_t>(size));
      text.erase(0, text.size() - std::min(text.size(), tail));
      if (!text.ends_with("\r\n0\r\n\r\n")) continue;
      tokens += tokens_of(text);
      close(waiting[i].fd);
      waiting[i].fd = -1;  // poll passes it over
      --left;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::printf("{\"tokens\": %ld, \"seconds\": %.6f, \"processor\": %.6f, \"reads\": %ld}\n", tokens, took.count(),
              seconds(used.ru_utime) + seconds(used.ru_stime), reads);
}
