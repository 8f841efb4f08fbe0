/** Server-sent events out of a response's body: of the console's feed, and of answers that stream. */

/**
 * Yields each event of a body as `{event, data}`; a line that is a comment or an unknown field is skipped.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { event: "message", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line !== "") {
          takeLine(event, line);
          continue;
        }
        if (event.data.length) yield { event: event.event, data: event.data.join("\n") };
        event = { event: "message", data: [] };
      }
    }
  } finally {
    reader.cancel().catch(() => undefined); // the body has failed already, and said so where it was read
  }
}

function takeLine(event, line) {
  const colon = line.indexOf(":");
  const field = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (field === "event") event.event = value;
  else if (field === "data") event.data.push(value);
}
