/**
 * Samples of a tenant's own requests, made of their rows: the gateway's own samples are of all requests, and are not
 * told to tenants. Pure.
 */

/** The measures that rows have: by name of a sample's histogram, the row's milliseconds. */
const MEASURES = { ttft: (row) => row.ttft_ms, e2e: (row) => row.ms };

const MOST_SAMPLES = 720; // as the gateway keeps

/** The names of these measures. */
export const OWN_MEASURES = Object.keys(MEASURES);

/**
 * @param {Object[]} rows - newest first
 * @param {Object<string, number[]>} bounds - of the histograms, in seconds
 * @param {number} now - seconds since 1970
 * @returns {Object[]} samples as the feed's, oldest first, with what rows tell; each request is in that of its end.
 *   There is one for each step from the first request's until now, so that rates know of quiet times
 */
export function ownSamples(rows, bounds, stepS, now) {
  const current = Math.floor(now / stepS);
  const done = rows
    .filter((row) => row.state === "done")
    .map((row) => ({ row, step: Math.floor((row.at + row.ms / 1000) / stepS) }))
    .filter(({ step }) => Math.abs(step - current) < MOST_SAMPLES); // clocks may have been set
  if (done.length === 0) return [];
  const first = done.reduce((least, { step }) => Math.min(least, step), Infinity);
  const last = done.reduce((most, { step }) => Math.max(most, step), current - 1);
  const samples = [];
  for (let step = first; step <= last; step += 1) samples.push(emptySample((step + 1) * stepS, bounds, stepS));
  for (const { row, step } of done) addRow(samples[step - first], row, bounds);
  return samples;
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
