import { drawCharts } from "./charts.js";
import { follow } from "./follow.js";
import { listenToKeys } from "./keys.js";
import { keepTelling, tellTimes } from "./times.js";
import { tryPolicies } from "./try.js";
import { bringWatched, watchKeys } from "./watch.js";

const THEMES = ["auto", "light", "dark"];

/** Everything that has to be done again when the main part has changed. */
function refresh() {
  tellTimes();
  drawCharts();
  watchKeys();
}

function offerThemes() {
  const button = document.getElementById("theme");
  const show = () => {
    button.textContent = window.fairlaneTheme.chosen();
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(window.fairlaneTheme.chosen()) + 1) % THEMES.length];
    window.fairlaneTheme.choose(next);
    show();
    drawCharts({ anew: true });
  });
  show();
}

bringWatched();
offerThemes();
listenToKeys();
keepTelling();
refresh();
follow(refresh);
tryPolicies();
