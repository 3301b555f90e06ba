// Reads Prometheus text, and computes rates and percentiles from two readings.

// Returns a map from a name without its prefix (`redline:`, `vllm:`) to its samples: [{ labels, value }].
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(?:[a-zA-Z_]\w*:)?([a-zA-Z_]\w*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const [, name, inner, number] = match;
    const value = number === "+Inf" ? Infinity : number === "-Inf" ? -Infinity : Number(number);
    const labels = Object.fromEntries([...(inner ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char))]));
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value });
  }
  return found;
}

// Returns the sum over all labels, or null if the server has no such metric. Counters may end in `_total`.
export function total(metrics, name) {
  const samples = metrics.get(name) ?? metrics.get(`${name}_total`);
  return samples ? samples.reduce((sum, { value }) => sum + value, 0) : null;
}

export function byLabel(metrics, name, label) {
  const sums = {};
  for (const { labels, value } of metrics.get(name) ?? metrics.get(`${name}_total`) ?? [])
    sums[labels[label] ?? ""] = (sums[labels[label] ?? ""] ?? 0) + value;
  return sums;
}

function buckets(metrics, name) {
  const sums = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(edge, (sums.get(edge) ?? 0) + value);
  }
  return sums;
}

// Returns a percentile of what a histogram counted between two readings, interpolated within its bucket as Prometheus
// does, or null if it counted nothing.
export function percentile(before, after, name, share) {
  const then = buckets(before, name), now = [...buckets(after, name)].sort(([one], [other]) => one - other);
  const counts = now.map(([edge, count]) => [edge, count - (then.get(edge) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return null;
  let low = 0, below = 0;
  for (const [edge, count] of counts) {
    if (count >= share * all) return Number.isFinite(edge) ? low + (edge - low) * (share * all - below) / Math.max(count - below, 1e-12) : low;
    [low, below] = [edge, count];
  }
  return low;
}

// Returns by how much a counter grew per second. A counter that shrank belongs to a server that was started again.
export function rate(before, after, name, seconds) {
  const then = total(before, name), now = total(after, name);
  return then === null || now === null || seconds <= 0 || now < then ? null : (now - then) / seconds;
}
