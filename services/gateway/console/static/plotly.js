/**
 * Plotly, which draws the charts: the file beside this page, out of the Python package plotly where that is installed
 * at the gateway. The first page that needs it loads it; five megabytes that the other pages do without.
 *
 * The pages' policy allows no style within the page. Plotly has a switch for this, an element of a certain id and
 * class; charts.css has the rules that it then does without. The map library within it has no switch, and no chart here
 * is a map: while plotly loads, styles that are appended are left out.
 */

export const INSTALL = "pip install 'baton-serve[console]'"; // as the gateway says it, see static_files.py

const SWITCH = { id: "plotly.js-style-global", class: "no-inline-styles" };

let loading = null;

/** Plotly; null: it is not installed at the gateway, or cannot be had now. */
export function loadPlotly() {
  loading ??= load().catch(() => {
    loading = null; // the next page tries again
    return null;
  });
  return loading;
}

function load() {
  const { head } = document;
  const script = document.createElement("script");
  script.src = "plotly.min.js";
  const withoutStyles = document.createElement("meta");
  for (const [name, value] of Object.entries(SWITCH)) withoutStyles.setAttribute(name, value);
  head.append(withoutStyles);
  head.appendChild = (node) => (node.nodeName === "STYLE" ? node : Node.prototype.appendChild.call(head, node));
  return new Promise((resolve, reject) => {
    script.addEventListener("load", () => resolve(window.Plotly ?? null));
    script.addEventListener("error", () => {
      script.remove();
      reject(new Error("plotly.min.js cannot be loaded"));
    });
    head.append(script);
  }).finally(() => delete head.appendChild);
}
