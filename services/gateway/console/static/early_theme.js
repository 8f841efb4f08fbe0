// Sets the theme that the viewer chose before anything is drawn, so that a page does not flash in the other one.
// A plain script in the head: modules run after the page was parsed.
(() => {
  try {
    const chosen = localStorage.getItem("baton.console.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing: the system's theme holds.
  }
})();
