// One step of a decoder: who takes part with which tokens, their evaluation, and the choices behind it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/interruption.h"
#include "decoder/decoder.h"
#include "decoder/running.h"

namespace moeflux {

class Decoder::Step {
 public:
  // Takes over what others have handed to the decoder. Requests that come from here on wait for the next step.
  explicit Step(Decoder& decoder);
  // Puts aside those who are over.
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  std::vector<DecoderEvent> run(const Interruption& interruption);

 private:
  // A request, and the tokens that are evaluated for it.
  struct Part {
    Running* running;
    std::span<const int32_t> tokens;
  };

  void choose();
  void choose(std::span<Running* const> choosing);
  void go_on(const Interruption& interruption);
  void share_rows();
  void evaluate(std::vector<Part> parts, const Interruption& interruption);
  bool refuse(std::vector<Part>& parts, const std::vector<Work>& work, const Error& error);
  std::vector<DecoderEvent> tell();

  Decoder& decoder_;
  std::vector<Running*> running_;  // by ascending id
  std::vector<Part> parts_;
};

}  // namespace moeflux
