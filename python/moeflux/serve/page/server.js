// The server, as the page asks it: the same interface that every other client has.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Server {
  constructor(key = "") {
    this.key = key;
  }

  async get(path) {
    const answer = await fetch(path, { headers: this._headers() });
    if (!answer.ok) throw await failure(answer);
    return answer;
  }

  /**
   * Streams an answer. Of `told`, these are called: text, thought, callBegins(index, id, name),
   * callGoesOn(index, text), reading(tokens, of). Returns { ending, usage }. Throws an AbortError when `signal` says stop.
   */
  async answer(body, told, signal) {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this._headers() },
      body: JSON.stringify(asked),
      signal,
    });
    if (!answer.ok) throw await failure(answer);
    const result = { ending: null, usage: null };
    let done = false;
    for await (const line of linesOf(answer.body)) {
      if (line.startsWith(":")) {
        const read = /prompt (\d+) of (\d+)/.exec(line);
        if (read) told.reading(Number(read[1]), Number(read[2]));
      } else if (line === "data: [DONE]") done = true;
      else if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)), told, result);
    }
    if (!done) throw new ServerError("The connection ended in the midst of the answer.", 0);
    return result;
  }

  _headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }
}

function take(chunk, told, result) {
  if (chunk.error) throw new ServerError(chunk.error.message, 0);
  if (chunk.usage) result.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
  if (thought) told.thought(thought);
  if (content) told.text(content);
  for (const call of calls ?? []) {
    if (call.id) told.callBegins(call.index, call.id, call.function.name);
    if (call.function?.arguments) told.callGoesOn(call.index, call.function.arguments);
  }
  if (choice.finish_reason) result.ending = choice.finish_reason;
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines.map((line) => line.replace(/\r$/, "")).filter(Boolean);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failure(answer) {
  let message = `The server answered with status ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // The status has to do.
  }
  return new ServerError(message, answer.status);
}

/** Prometheus' lines as { name: value }, with labels in the name as they stand there. */
export function numbersOf(text) {
  const numbers = {};
  for (const line of text.split("\n")) {
    const end = line.lastIndexOf(" ");
    if (end > 0 && !line.startsWith("#")) numbers[line.slice(0, end)] = Number(line.slice(end + 1));
  }
  return numbers;
}
