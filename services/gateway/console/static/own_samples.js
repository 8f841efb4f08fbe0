/**
 * Samples of a tenant's own requests, made of their rows: the gateway's own samples are of all requests, and are not
 * told to tenants. Pure.
 */

/** The measures that rows have: by name of a sample's histogram, the row's milliseconds. */
const MEASURES = { ttft: (row) => row.ttft_ms, e2e: (row) => row.ms };

/** The names of these measures. */
export const OWN_MEASURES = Object.keys(MEASURES);

/**
 * @param {Object[]} rows - newest first
 * @param {Object<string, number[]>} bounds - of the histograms, in seconds
 * @param {number} stepS - the length of a sample
 * @returns {Object[]} samples as the feed's, oldest first, with what rows tell; each request is in that of its end
 */
export function ownSamples(rows, bounds, stepS) {
  const samples = new Map();
  for (const row of rows) {
    if (row.state !== "done") continue;
    const at = (Math.floor((row.at + row.ms / 1000) / stepS) + 1) * stepS;
    if (!samples.has(at)) samples.set(at, emptySample(at, bounds, stepS));
    addRow(samples.get(at), row, bounds);
  }
  return [...samples.values()].sort((a, b) => a.at - b.at);
}

function emptySample(at, bounds, stepS) {
  const sample = { at, s: stepS, prompt_tokens: 0, cached_tokens: 0, sums: {} };
  for (const name of OWN_MEASURES) {
    sample[name] = new Array(bounds[name].length + 1).fill(0);
    sample.sums[name] = 0;
  }
  return sample;
}

function addRow(sample, row, bounds) {
  sample.prompt_tokens += row.prompt ?? 0;
  sample.cached_tokens += row.cached ?? 0;
  for (const [name, milliseconds] of Object.entries(MEASURES)) {
    const seconds = milliseconds(row) / 1000;
    if (milliseconds(row) === null) continue;
    const bucket = bounds[name].findIndex((bound) => seconds <= bound);
    sample[name][bucket < 0 ? bounds[name].length : bucket] += 1;
    sample.sums[name] += seconds;
  }
}
