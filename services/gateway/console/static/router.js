/** Pages by the address after #: `#/fleet`, `#/requests?state=failed`, `#/requests/ID`. */

/**
 * The address in parts.
 *
 * @param {string} hash - as `location.hash` has it
 * @returns {{page: string, id: string|null, query: URLSearchParams}} page: "" where none is named
 */
export function readHash(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const slash = path.indexOf("/");
  const page = slash < 0 ? path : path.slice(0, slash);
  return { page, id: slash < 0 ? null : decode(path.slice(slash + 1)), query: new URLSearchParams(query) };
}

/** The address of one request's page. number: of a request at this gateway; null: the newest of that id is meant. */
export function requestHash(id, number = null) {
  return `#/requests/${encodeURIComponent(id)}${number === null ? "" : `?n=${number}`}`;
}

/** Writes filters into the address without a new entry in the browser's history. Empty ones are left out. */
export function keepQuery(page, values) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null));
  const text = query.toString();
  history.replaceState(null, "", `#/${page}${text ? `?${text}` : ""}`);
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand, with a % that encodes nothing
  }
}
