/** Numbers, sizes and times as people read them. Missing values are a dash. Times are in the viewer's zone. */

export const NONE = "–";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const threeDigits = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });
const clockFormat = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const dayFormat = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

function is(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A whole number with separators. */
export function count(value) {
  return is(value) ? whole.format(value) : NONE;
}

/** A number in few characters: 12.3K. */
export function shortCount(value) {
  return is(value) ? short.format(value) : NONE;
}

/** A rate: one decimal where it is small. */
export function rate(value) {
  if (!is(value)) return NONE;
  return value < 100 ? oneDigit.format(value) : whole.format(value);
}

/** A share between 0 and 1 as per cent. */
export function percent(value) {
  if (!is(value)) return NONE;
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${value > 0 && value < 0.1 ? oneDigit.format(value * 100) : whole.format(value * 100)} %`;
}

/** Bytes in the unit that fits. */
export function bytes(value) {
  if (!is(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(size) : threeDigits.format(size)} ${units[unit]}`;
}

/** Milliseconds in the unit that fits, with three digits. */
export function duration(ms) {
  if (!is(ms)) return NONE;
  if (ms < 1000) return `${ms < 100 ? threeDigits.format(ms) : whole.format(ms)} ms`;
  if (ms < 60_000) return `${threeDigits.format(ms / 1000)} s`;
  return span(ms / 1000);
}

/** Milliseconds with a fixed number of decimals, for figures that are added up. */
export function exactMs(ms, digits = 2) {
  return is(ms)
    ? `${ms.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits })} ms`
    : NONE;
}

/** Seconds as the two largest units: 3 min 5 s. */
export function span(seconds) {
  if (!is(seconds)) return NONE;
  const all = Math.max(0, Math.round(seconds));
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86_400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86_400)} d ${Math.floor((all % 86_400) / 3600)} h`;
}

/** Seconds since 1970 as the time of day. */
export function clock(at) {
  return is(at) ? clockFormat.format(at * 1000) : NONE;
}

/** Seconds since 1970 as day and time, with the zone. */
export function dayAndTime(at) {
  return is(at) ? dayFormat.format(at * 1000) : NONE;
}

/** Seconds since 1970 as "2026-11-26 19:51:14" in the viewer's zone, which is what charts take for a time. */
export function localTime(at) {
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Addresses by their ends: what all of them begin with is left out, up to a point or a colon. */
export function shortNames(addresses) {
  const [first = "", ...others] = addresses;
  let same = 0;
  while (same < first.length && others.every((other) => other[same] === first[same])) same += 1;
  const common = first.slice(0, same);
  const from = others.length ? Math.max(common.lastIndexOf(".") + 1, common.lastIndexOf(":")) : first.lastIndexOf(":");
  return new Map(addresses.map((address) => [address, address.slice(Math.max(0, from))]));
}

/** "1 request", "2 requests". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
