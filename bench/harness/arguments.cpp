#include "arguments.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <thread>

namespace bench {

using moeflux::concat;

const char* const help_text =
    R"(usage: moeflux-bench STORE [options]

Measures prefill and decode of the model in the folder STORE, a store that moeflux wrote (`moeflux convert`,
`moeflux synth`). Prints one line of JSON for each measurement, and a table for people on stderr.

  --prefill N,N,...  context frontiers, ascending (512)
  --decode N         steps to decode at each frontier, 0 for none (32)
  --sessions N,N,... sessions that decode together, one number after another (1)
  --threads T,T,...  engines to try, one after another, each with so many threads (one per core)
  --slots N          experts held in memory, a GPU's own if it has any, 0 for all of them (0)
  --host-slots N     there, experts held in the host's memory (0)
  --reads WORD       how experts are read: direct, buffered or auto (auto)
  --readers N        threads that read experts, 0 for the engine's choice (0)
  --cache WORD       which expert goes when a slot is needed: lru, lfu or none (lru)
  --look-ahead WORD  read what the next layer may need: on, off or auto (auto)
  --speculate WORD   evaluate likely next tokens ahead: off, lookup, mtp or auto (off)
  --cold             drop the layer files from the page cache before every walk
  --reps N           warm walks after the first, 0 for none (3)
  --chunk N          tokens in a prefill chunk at most, 0 for the engine's choice (0)
  --backend WORD     what computes: cpu, metal, cuda or auto (auto)
  --isa NAME         kernels: portable, avx2, avx512, avx512vnni, amx or neon (the best the machine has)
  --precision WORD   of activations: auto, 16 bits where that is faster, or exact, f32 (auto)
  --kv f32|bf16|q8   type of the key-value rows (f32)
  --sampling WORDS   how a decode's tokens are drawn, as temperature=0.7,top_p=0.95; also top_k, min_p,
                     repetition_penalty, presence_penalty, frequency_penalty, seed (the likeliest token is taken)
  --json FILE|-      where the JSON lines go (-, stdout)
  --roofline         also time each kind of op, and compare it with the limits of this machine, from the same run
  --count WORD       time nothing; count system calls (calls) or instructions, or nothing (Linux)

How it measures. A walk goes from frontier to frontier over a fixed sequence of tokens. At each frontier
  1. only the tokens since the frontier before are prefilled and timed: what == "prefill";
  2. a checkpoint is made;
  3. N + 1 steps follow, each with the likeliest next token, or with one that --sampling draws. The first step is
     thrown away. The N others are timed, including the choice of the token: what == "decode". The choices alone
     took choosing_seconds;
     With --sessions, that is done for each number of sessions in turn. Each has tokens of its own, and has been
     prefilled, untimed, to the same frontier. A step is then a token of each of them, evaluated in one call;
  4. the session is rewound to the checkpoint, and the walk goes on as if nothing had been decoded.
The first walk, rep 0, finds no expert in memory and reads what it needs. It is reported and left out of the medians. If
--slots is below all, the disk is probed before each decode. As many threads as read experts then read random experts
and do nothing else: disk_bandwidth.

Fields of a measurement. disk_bytes is what the system says it read from disks for this process. over_the_bound is the
time, divided by the longer of compute_seconds and the time that the probed disk takes for bytes_read. It is 1 when
reading and computing hide each other wholly. Parts of compute_seconds are router_seconds, until the routers have
spoken; beside_seconds, in the shared expert and the experts that were in memory, beside the reads; and arrived_seconds,
in experts as they arrived. hit_rate is the share of experts that were in memory or on their way. wait_share is the
share of the time that stood still for reads. look_ahead_recall is the share of experts to read whose reads the
look-ahead had begun. look_ahead_precision is the share of its reads that was wanted. A share of nothing is null. Just
before each measurement, as many threads as compute read from a large buffer: read_bandwidth. A decode's
share_of_read_bandwidth is bytes_touched (the weights and the state that its steps cannot do without) / seconds /
read_bandwidth; null for several sessions, because what they touch depends on how many experts they share.

--roofline adds a line what == "limits" for each engine: the read_bandwidth of its threads, the peaks of multiply-adds a
second in registers for each instruction set, and the disk_bandwidth of expert reads done in its way (through the page
cache, if that is its way). Lines what == "op" follow each measurement: seconds, the bytes that ops of the kind cannot
leave untouched, and products (multiply-adds), each also as a rate and as a share of its limit. share_of_roofline is the
least time that the slower of memory and multiplication takes / seconds. It is over 1 where caches gave what memory
would have given. Through int8 instructions, a product takes a multiply-add for each of the two bytes of an activation,
so it reaches half the peak at most. The host times the ops and looks at the clock twice for each.
On a GPU each op is submitted and awaited by itself, and what a copy of 16 bytes takes is subtracted. So a step takes
longer than without --roofline, kernels that would do several ops at once do not, and ops of a few microseconds are told
roughly. If it has memory of its own, read_bandwidth is that of copies there (what they read and write), and there are no
peaks. Ops that wait for the host in the midst of a batch, as those behind experts that are read, are not in the lines.

--count prefills the first frontier and takes the steps after it, twice. The second time it counts every system call, or
every instruction, of one thread, with every expert in memory: what == "count". The number is the same on a busy
machine. It counts only some 50,000 instructions a second, so it needs a very small model. --count nothing does the same
work, for a profiler that counts.

Ctrl-C ends the program after the call under way. Exit code: 0, 1 when something failed, 2 for wrong arguments, 130
after Ctrl-C.

example: moeflux synth /tmp/a3b --variant a3b --layers 8 --vocab 8192
         moeflux-bench /tmp/a3b --prefill 512,2048 --decode 32 --threads 1,2 --json lines.json
)";

namespace {

constexpr int64_t max_tokens = moeflux::max_context_limit;

// Digits only, `min` to `max`.
int64_t integer(const std::string& where, const std::string& text, int64_t min, int64_t max) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  const int64_t value = digits && text.size() <= 18 ? std::stoll(text) : std::numeric_limits<int64_t>::max();
  if (value < min || value > max)
    throw ArgumentError(concat(where, ": expected ", min, " to ", max, ", found \"", text, "\""));
  return value;
}

std::vector<int64_t> integers(const std::string& where, const std::string& text, int64_t min, int64_t max) {
  std::vector<int64_t> values;
  size_t begin = 0;
  for (;;) {
    const size_t comma = text.find(',', begin);
    values.push_back(integer(where, text.substr(begin, comma - begin), min, max));
    if (comma == std::string::npos) return values;
    begin = comma + 1;
  }
}

std::string one_of(const std::string& where, const std::string& text, const std::vector<std::string>& words) {
  if (std::find(words.begin(), words.end(), text) != words.end()) return text;
  std::string expected;
  for (const std::string& word : words) expected += (expected.empty() ? "" : ", ") + word;
  throw ArgumentError(concat(where, ": expected one of ", expected, ", found \"", text, "\""));
}

template <typename Choice>
Choice choice(const std::string& where, const std::string& text) {
  try {
    return moeflux::choice_of<Choice>(where, text);
  } catch (const moeflux::ArgumentError& error) {
    throw ArgumentError(error.what());
  }
}

double real(const std::string& where, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end) throw ArgumentError(concat(where, ": expected a number, found \"", text, "\""));
  return value;
}

const std::map<std::string, double moeflux::Sampling::*> sampling_numbers = {
    {"temperature", &moeflux::Sampling::temperature},
    {"top_p", &moeflux::Sampling::top_p},
    {"min_p", &moeflux::Sampling::min_p},
    {"repetition_penalty", &moeflux::Sampling::repetition_penalty},
    {"presence_penalty", &moeflux::Sampling::presence_penalty},
    {"frequency_penalty", &moeflux::Sampling::frequency_penalty},
};

// One or more NAME=NUMBER, separated by commas.
moeflux::Sampling sampling_of(const std::string& where, const std::string& text) {
  moeflux::Sampling sampling;
  for (size_t begin = 0; begin <= text.size();) {
    const std::string word = text.substr(begin, text.find(',', begin) - begin);
    begin += word.size() + 1;
    const std::string name = word.substr(0, word.find('='));
    const std::string value = word.substr(std::min(word.size(), name.size() + 1));
    const std::string field = concat(where, " ", name);
    if (const auto number = sampling_numbers.find(name); number != sampling_numbers.end())
      sampling.*number->second = real(field, value);
    else if (name == "top_k")
      sampling.top_k = integer(field, value, 0, std::numeric_limits<int32_t>::max());
    else if (name == "seed")
      sampling.seed = static_cast<uint64_t>(integer(field, value, 0, std::numeric_limits<int64_t>::max() - 1));
    else
      throw ArgumentError(concat(where, ": expected NAME=NUMBER with a name of --help, found \"", word, "\""));
  }
  try {
    const moeflux::Sampler of_two(sampling, 2, {});
  } catch (const moeflux::Error& error) {
    throw ArgumentError(concat(where, " ", error.what()));
  }
  return sampling;
}

using Option = void (*)(Arguments&, const std::string& name, const std::string& value);

const std::map<std::string, Option> options = {
    {"--prefill",
     [](Arguments& a, const std::string& name, const std::string& value) {
       a.frontiers = integers(name, value, 1, max_tokens);
       const auto fall = std::adjacent_find(a.frontiers.begin(), a.frontiers.end(), std::greater_equal<>());
       if (fall != a.frontiers.end())
         throw ArgumentError(concat(name, ": expected ascending contexts, found ", fall[1], " after ", fall[0]));
     }},
    {"--decode", [](Arguments& a, const std::string& name,
                    const std::string& value) { a.decode = integer(name, value, 0, max_tokens); }},
    {"--sessions", [](Arguments& a, const std::string& name,
                      const std::string& value) { a.sessions = integers(name, value, 1, 1024); }},
    {"--threads", [](Arguments& a, const std::string& name,
                     const std::string& value) { a.threads = integers(name, value, 1, 1024); }},
    {"--slots", [](Arguments& a, const std::string& name,
                   const std::string& value) { a.slots = integer(name, value, 0, int64_t{1} << 30); }},
    {"--host-slots", [](Arguments& a, const std::string& name,
                        const std::string& value) { a.host_slots = integer(name, value, 0, int64_t{1} << 30); }},
    {"--reads", [](Arguments& a, const std::string& name,
                   const std::string& value) { a.reads = choice<moeflux::Reads>(name, value); }},
    {"--readers",
     [](Arguments& a, const std::string& name, const std::string& value) { a.readers = integer(name, value, 0, 256); }},
    {"--cache", [](Arguments& a, const std::string& name,
                   const std::string& value) { a.cache = choice<moeflux::CachePolicy>(name, value); }},
    {"--look-ahead", [](Arguments& a, const std::string& name,
                        const std::string& value) { a.look_ahead = choice<moeflux::LookAhead>(name, value); }},
    {"--speculate", [](Arguments& a, const std::string& name,
                       const std::string& value) { a.speculate = choice<moeflux::Speculate>(name, value); }},
    {"--reps",
     [](Arguments& a, const std::string& name, const std::string& value) { a.reps = integer(name, value, 0, 1000); }},
    {"--chunk",
     [](Arguments& a, const std::string& name, const std::string& value) { a.chunk = integer(name, value, 0, 8192); }},
    {"--backend", [](Arguments& a, const std::string& name,
                     const std::string& value) { a.backend = one_of(name, value, {"auto", "cpu", "cuda", "metal"}); }},
    {"--isa",
     [](Arguments& a, const std::string& name, const std::string& value) {
       a.isa = one_of(name, value, {"portable", "avx2", "avx512", "avx512vnni", "amx", "neon"});
     }},
    {"--precision", [](Arguments& a, const std::string& name,
                       const std::string& value) { a.precision = choice<moeflux::Precision>(name, value); }},
    {"--kv",
     [](Arguments& a, const std::string& name, const std::string& value) {
       a.kv_name = one_of(name, value, {"f32", "bf16", "q8"});
       a.kv = a.kv_name == "f32"    ? moeflux::DType::f32
              : a.kv_name == "bf16" ? moeflux::DType::bf16
                                    : moeflux::DType::i8;
     }},
    {"--sampling",
     [](Arguments& a, const std::string& name, const std::string& value) {
       a.sampling = sampling_of(name, value);
       a.sampling_text = value;
     }},
    {"--count", [](Arguments& a, const std::string& name,
                   const std::string& value) { a.count = one_of(name, value, {"calls", "instructions", "nothing"}); }},
    {"--json",
     [](Arguments& a, const std::string& name, const std::string& value) {
       if (value.empty()) throw ArgumentError(concat(name, ": expected a file or -, found nothing"));
       a.json = value;
     }},
};

const std::map<std::string, bool Arguments::*> flags = {
    {"--cold", &Arguments::cold},
    {"--roofline", &Arguments::roofline},
};

void take_store(Arguments& arguments, const std::string& word) {
  if (word.empty()) throw ArgumentError("STORE: expected a folder, found nothing");
  if (!arguments.store.empty())
    throw ArgumentError(concat("STORE: expected one folder, found \"", arguments.store, "\" and \"", word, "\""));
  arguments.store = word;
}

}  // namespace

Arguments parse_arguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--help" || word == "-h") {
      arguments.help = true;
      return arguments;
    }
    if (word.empty() || word[0] != '-') {
      take_store(arguments, word);
      continue;
    }
    if (const auto flag = flags.find(word); flag != flags.end()) {
      arguments.*flag->second = true;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const auto option = options.find(name);
    if (option == options.end())
      throw ArgumentError(concat("arguments: expected an option of --help, found \"", name, "\""));
    if (equals == std::string::npos && i + 1 == words.size())
      throw ArgumentError(concat(name, ": expected a value, found the end of the arguments"));
    option->second(arguments, name, equals == std::string::npos ? words[++i] : word.substr(equals + 1));
  }
  if (arguments.store.empty()) throw ArgumentError("STORE: expected a folder, found none");
  if (arguments.threads.empty()) arguments.threads = {std::max(1u, std::thread::hardware_concurrency())};
  return arguments;
}

}  // namespace bench
