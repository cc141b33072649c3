// The JSON reader: what it accepts is unchanged when written and read again, and keys are found.
#include "json_text.h"
#include "target.h"

using namespace moeflux;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Json value;
  try {
    value = parse_json(fuzz::as_text(data, size), "input");
  } catch (const FormatError& error) {
    fuzz::check_message(error, "input: ");
    return 0;
  }
  const Json again = parse_json(fuzz::json_text(value), "rewritten");
  fuzz::require(fuzz::same_json(value, again), "JSON is unchanged when written and read again");
  if (const Json::Object* object = value.object())
    for (const JsonMember& member : *object)
      fuzz::require(value.find(member.key) == &member.value, "a key is found, and once");
  fuzz::require(!value.describe().empty(), "a value describes itself");
  return 0;
}
