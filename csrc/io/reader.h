// Where expert bytes come from: one open file, read from several threads at once.
//
// Direct reads bypass the page cache, so that a memory budget is not spent twice. Linux takes them only if the offset,
// the length and the destination are multiples of direct_alignment. A read with all three goes straight into place. In
// a packed store whose experts are whole blocks, every expert does. Any other read goes through a bounce buffer of the
// reading thread, block by block, and is copied. A shifted landing place for each read would save that copy. But MLX
// files start their data at any byte, and kernels (and Metal) need whole words, so a slot would hold numbers where
// nobody may load them. Therefore slots look the same in every mode and for every kind of store.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/file.h"

namespace moeflux {

enum class ReadMode { buffered, direct };

constexpr int64_t direct_alignment = 4096;
// The size of one reading thread's bounce buffer, for direct reads that are not aligned. It is large enough to keep an
// SSD busy.
constexpr int64_t bounce_bytes = int64_t{1} << 20;
// The part of it, before the rest, that rows of two matrices land in before they are taken apart. The rest is then a
// block longer, so that an unaligned read of so much takes one call.
constexpr int64_t turns_bytes = int64_t{1} << 20;
// Of a thread whose bytes are carried on, in two halves.
constexpr int64_t staging_bytes = int64_t{1} << 21;

// What was asked of the system and what it gave, including the blocks around the wanted bytes.
struct ReadCounts {
  int64_t calls = 0;
  int64_t bytes = 0;
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Fills `into` from `offset` on, or throws IoError and leaves it in any state. `bounce` belongs to the calling
  // thread: aligned to direct_alignment, bounce_bytes long, or empty where no read needs it.
  virtual void read(int64_t offset, std::span<std::byte> into, std::span<std::byte> bounce) = 0;
  virtual const std::string& path() const = 0;
  virtual int64_t bytes() const = 0;  // the file's length when it was opened
  // IoError when the path no longer leads to the file that was opened, or that one was written to since.
  virtual void check_unchanged() const = 0;
  virtual ReadCounts counts() const = 0;
};

// Which file this was, and in what state.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t bytes = 0;
  int64_t modified = 0;  // nanoseconds
  bool operator==(const FileStamp&) const = default;
};

class FileReader : public Reader {
 public:
  // IoError when the file cannot be opened, or its file system has no direct reads and they were asked for.
  FileReader(std::string path, ReadMode mode);

  void read(int64_t offset, std::span<std::byte> into, std::span<std::byte> bounce) override;
  const std::string& path() const override { return file_.path(); }
  int64_t bytes() const override { return file_.bytes(); }
  void check_unchanged() const override;
  ReadCounts counts() const override;

 protected:
  // One call of pread. Returns how many bytes it gave, 0 at the end of the file, or -1 with errno. Tests let the system
  // fail here.
  virtual int64_t read_some(int64_t offset, std::span<std::byte> into);

 private:
  int64_t fill(int64_t offset, std::span<std::byte> into, int64_t needed);
  int64_t read_through(int64_t offset, std::span<std::byte> into, std::span<std::byte> bounce);
  std::string describe_end() const;

  File file_;
  ReadMode mode_;
  FileStamp stamp_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
};

// Opens the files of a store: FileReader, or what a test puts in its place.
using ReaderFactory = std::function<std::unique_ptr<Reader>(const std::string& path, ReadMode mode)>;
ReaderFactory file_readers();

// Whether the file system of this file has direct reads; it tries one. IoError when the file cannot be opened.
bool supports_direct(const std::string& path);

}  // namespace moeflux
