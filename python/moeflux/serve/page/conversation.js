// A conversation is a tree: what is edited or asked again stands beside what was there before, and both are kept.
//
// A message is { id, parent, role, text } and, of an answer: thought, calls [{ id, name, arguments }], ending, numbers.
// A result of a call is { role: "tool", call, text }. The root is "".

export class Conversation {
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.title = kept.title ?? "";
    this.changed = kept.changed ?? Date.now();
    this.messages = kept.messages ?? {}; // by id, in the order in which they were made
    this.chosen = kept.chosen ?? {}; // which message follows a message, of several
  }

  add(parent, message) {
    const made = { id: newId(), parent, text: "", ...message };
    this.messages[made.id] = made;
    this.chosen[parent] = made.id;
    this.changed = Date.now();
    if (!this.title && made.role === "user") this.title = titleOf(made.text);
    return made;
  }

  /** All that stand in the place of a message, the oldest first. */
  beside(message) {
    return Object.values(this.messages).filter((each) => each.parent === message.parent);
  }

  choose(message) {
    this.chosen[message.parent] = message.id;
  }

  /** The messages that are shown, from the first to the last. */
  path() {
    const following = new Map();
    for (const message of Object.values(this.messages)) following.set(message.parent, message.id);
    const path = [];
    for (let at = ""; ;) {
      const next = this.messages[this.chosen[at]] ?? this.messages[following.get(at)];
      if (!next) return path;
      path.push(next);
      at = next.id;
    }
  }

  /** The messages up to one, as the server wants them. */
  upTo(last, instructions) {
    const sent = [];
    for (let at = last; at; at = this.messages[at.parent]) sent.unshift(asSent(at));
    return instructions ? [{ role: "system", content: instructions }, ...sent] : sent;
  }
}

function asSent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.text };
  if (message.role === "user") return { role: "user", content: message.text };
  const sent = { role: "assistant", content: message.text };
  if (message.thought) sent.reasoning_content = message.thought;
  if (message.calls?.length) {
    sent.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return sent;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
