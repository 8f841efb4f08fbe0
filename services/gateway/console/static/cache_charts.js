/** What the charts of the cache's page show, by groups of samples: as `Chart.show` takes it, null for nothing. */

import { percent, rate, shortNames } from "./format.js";
import { ratio, total } from "./percentiles.js";

const TONES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
const AS_SHARE = { words: percent, axis: { tickformat: ".0%", range: [0, 1.02] } };

/** The share of prompt tokens that a cache had. */
export function hitRates(groups) {
  const of = ({ samples }) =>
    ratio(
      total(samples, (sample) => sample.cached_tokens),
      total(samples, (sample) => sample.prompt_tokens),
    );
  const values = groups.map(of);
  const last = values.findLast((value) => value !== null);
  if (last === undefined) return null;
  return {
    ...AS_SHARE,
    times: timesOf(groups),
    summary: `last ${percent(last)}`,
    lines: [{ name: "hit rate", tone: TONES[0], values }],
  };
}

/** Prompt tokens a second, all and cached. */
export function promptTokens(groups) {
  const all = perSecond(groups, "prompt_tokens");
  if (all.every((value) => !value)) return null;
  const cached = perSecond(groups, "cached_tokens");
  const lines = [
    { name: "all", tone: TONES[0], values: all },
    { name: "cached", tone: TONES[1], dash: "dash", values: cached },
  ];
  return { times: timesOf(groups), words: rate, summary: "all and cached", lines };
}

/** Blocks a second that workers evicted. */
export function evictions(groups) {
  const counted = groups.some(({ samples }) => samples.some((sample) => typeof sample.evicted_blocks === "number"));
  if (!counted) return null;
  const values = perSecond(groups, "evicted_blocks");
  return {
    times: timesOf(groups),
    words: rate,
    summary: "by all workers",
    lines: [{ name: "evicted", tone: TONES[2], values }],
  };
}

/** The share of each worker's KV that was in use. */
export function kvInUse(groups) {
  const all = groups.flatMap(({ samples }) => samples.flatMap((sample) => Object.keys(sample.kv_used ?? {})));
  const workers = [...new Set(all)].sort();
  if (workers.length === 0) return null;
  const names = shortNames(workers);
  const used = (samples, worker) =>
    samples.map((sample) => sample.kv_used?.[worker]).findLast((value) => value !== undefined);
  const lines = workers.map((worker, index) => ({
    name: names.get(worker),
    tone: TONES[index % TONES.length],
    dash: index < TONES.length ? "solid" : "dot",
    values: groups.map(({ samples }) => used(samples, worker) ?? null),
  }));
  return { ...AS_SHARE, times: timesOf(groups), summary: `${workers.length} workers`, lines };
}

function timesOf(groups) {
  return groups.map((group) => group.at);
}

function perSecond(groups, field) {
  return groups.map(({ samples }) =>
    ratio(
      total(samples, (sample) => sample[field]),
      total(samples, (sample) => sample.s),
    ),
  );
}
