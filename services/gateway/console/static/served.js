/** Which workers served a request, in words. */

/** @param {{workers?: {prefill?: string, decode?: string}|null}} request - a record or a row; without workers where
 * this key may not know them, and then there are no words */
export function servedWords({ workers }) {
  if (workers === undefined) return "";
  const { prefill, decode } = workers ?? {};
  if (prefill && decode) return `Prefill worker ${prefill} handed over to decode worker ${decode}.`;
  if (decode) return `Decode worker ${decode} did all of it.`;
  return prefill ? `Prefill worker ${prefill} did all of it.` : "No worker has brought a token.";
}
