// Reads server-sent events from the body of a response.

// Yields { name, data } for each event. Ends when the body ends, and throws if the connection is lost.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", name = "", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (!line) {
          if (data.length) yield { name, data: data.join("\n") };
          name = "";
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
