// Before the first paint, and so no module: a page must not flash white at somebody who chose dark.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const chosen = () => localStorage.getItem("fairlane.theme") ?? "auto";

  const apply = () => {
    const theme = chosen();
    document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
    document.dispatchEvent(new CustomEvent("fairlane:theme", { detail: theme }));
  };

  dark.addEventListener("change", apply);
  window.fairlaneTheme = {
    chosen,
    choose(theme) {
      localStorage.setItem("fairlane.theme", theme);
      apply();
    },
  };
  apply();
})();
