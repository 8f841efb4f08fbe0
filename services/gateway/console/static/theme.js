/**
 * The theme: that of the system, or the one that the viewer chose, which this browser keeps.
 *
 * Colours are CSS variables of base.css. What is drawn with numbers of its own (charts) asks `colour` for them, and
 * draws again when `onTheme` calls.
 */

const KEPT = "baton.console.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** The choice: "system", "light" or "dark". */
export function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

/** Goes on to the next choice, keeps it and returns it. */
export function nextTheme() {
  const chosen = NEXT[theme()];
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    if (chosen === "system") localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, chosen);
  } catch {
    // A browser that keeps nothing: the choice holds until the page is closed.
  }
  tell();
  return chosen;
}

/** Calls `listener` whenever colours have changed. Returns a function that ends this. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The present value of a colour by its variable's name, as "--accent": a colour that any library reads. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function tell() {
  for (const listener of listeners) listener();
}

dark.addEventListener("change", tell);
