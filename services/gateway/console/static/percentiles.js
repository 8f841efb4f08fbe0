/** Percentiles of histograms, and samples added up. Pure. Times are in seconds. */

/**
 * The value below which a share of what was counted lies, by a straight line within its bucket.
 *
 * @param {number[]} counts - by bucket; one more than bounds, for what is above the last
 * @param {number[]} bounds - the buckets' upper ends, rising
 * @param {number} share - 0 to 1
 * @returns {number|null} null: nothing was counted. Above the last bound, that bound: it is at least this
 */
export function percentile(counts, bounds, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  const wanted = share * total;
  let below = 0;
  for (const [index, bound] of bounds.entries()) {
    if (counts[index] > 0 && below + counts[index] >= wanted) {
      const lower = index === 0 ? 0 : bounds[index - 1];
      return lower + ((bound - lower) * (wanted - below)) / counts[index];
    }
    below += counts[index];
  }
  return bounds.at(-1);
}

/** Adds lists of equal length, place by place. */
export function addUp(lists, length) {
  const sums = new Array(length).fill(0);
  for (const list of lists) for (let index = 0; index < length; index += 1) sums[index] += list[index] ?? 0;
  return sums;
}

/** The samples of the last seconds. One of the future, since a clock was set back, is none of them. */
export function recent(samples, now, seconds) {
  return samples.filter((sample) => sample.at >= now - seconds && sample.at < now + seconds);
}

/**
 * Samples in groups of so many, oldest first; a group's samples lie side by side in time. Groups begin at round times,
 * so that a group stays the same while newer samples come. A time without samples between others is an empty group.
 *
 * @param {Object[]} samples - oldest first @param {number} groupS - seconds in a group
 * @returns {Array<{at: number, samples: Object[]}>} at: where the group begins, in seconds since 1970
 */
export function grouped(samples, groupS) {
  const groups = [];
  for (const sample of samples) {
    const at = Math.floor(sample.at / groupS) * groupS;
    for (let next = groups.at(-1)?.at + groupS; next <= at; next += groupS) groups.push({ at: next, samples: [] });
    if (groups.length === 0) groups.push({ at, samples: [] });
    groups.at(-1).samples.push(sample);
  }
  return groups;
}

/** The sum of a number of samples, by a function of each. */
export function total(samples, of) {
  return samples.reduce((sum, sample) => sum + (of(sample) ?? 0), 0);
}

/** A share, or null where there is nothing that it could be of. */
export function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}

/**
 * A histogram over time as a matrix, without the buckets below the first and above the last that have anything.
 *
 * @param {number[][]} columns - counts by bucket, for each time
 * @param {number[]} bounds
 * @returns {{edges: number[], rows: number[][]}|null} edges: one more than rows, rising; null: all is empty
 */
export function matrix(columns, bounds) {
  const sums = addUp(columns, bounds.length + 1);
  const first = sums.findIndex((count) => count > 0);
  if (first < 0) return null;
  const last = sums.findLastIndex((count) => count > 0);
  const ends = [bounds[0] / 2, ...bounds, bounds.at(-1) * 2];
  const rows = [];
  for (let bucket = first; bucket <= last; bucket += 1) rows.push(columns.map((counts) => counts[bucket] ?? 0));
  return { edges: ends.slice(first, last + 2), rows };
}
