// Moments are sent as they are and shown here as "5 s ago": so a page whose facts stand still need not be sent again.
const UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

// The database's clock may differ from the browser's.
const skew = Date.parse(document.documentElement.dataset.now) - Date.now();

function lasting(seconds) {
  const parts = [];
  for (const [size, unit] of UNITS) {
    if (seconds >= size && parts.length < 2) {
      parts.push(`${Math.floor(seconds / size)} ${unit}`);
      seconds %= size;
    } else if (parts.length) {
      break;
    }
  }
  return parts.join(" ");
}

function shown(moment) {
  const seconds = Math.round((Date.now() + skew - moment) / 1000);
  if (seconds === 0) return "now";
  return seconds > 0 ? `${lasting(seconds)} ago` : `in ${lasting(-seconds)}`;
}

export function tellTimes() {
  for (const element of document.querySelectorAll("time.ago")) {
    const text = shown(Date.parse(element.dateTime));
    if (element.textContent !== text) element.textContent = text;
  }
}

export function keepTelling() {
  setInterval(() => {
    if (!document.hidden) tellTimes();
  }, 1000);
}
