// Server-sent events of a response (https://html.spec.whatwg.org/multipage/server-sent-events.html), of which only the data is used.

/** Yields the data of each event of `body`, a stream of bytes. An event that the stream's end cuts off is left out, as the standard says. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      // A carriage return at the end may be the first half of a line's end.
      const lines = held.split(held.endsWith("\r") ? /\r\n|\n|\r(?!$)/ : /\r\n|\n|\r/);
      held = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Whoever stops reading closes the connection, by which the server learns that nobody waits.
    await reader.cancel().catch(() => {});
  }
}
