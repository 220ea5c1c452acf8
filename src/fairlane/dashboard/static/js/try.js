// The form of "Try a policy" works without this; with it, one sees that something runs, can stop it, and is led to a line.

/** Puts a text into a field so that undo brings back what was there. */
function fill(field, text) {
  field.focus();
  field.select();
  // Deprecated, and the only way to fill a field that a person can take back with undo.
  if (!document.execCommand("insertText", false, text)) field.value = text;
}

function leadTo(field) {
  const lines = field.value.split("\n");
  const line = Math.min(Number(field.dataset.line), lines.length) - 1;
  const start = lines.slice(0, line).reduce((sum, each) => sum + each.length + 1, 0);
  field.focus();
  field.setSelectionRange(start, start + lines[line].length);
}

export function tryPolicies() {
  const form = document.querySelector("form[data-try]");
  if (!form) return;
  const button = form.querySelector("[data-busy]");
  const stop = form.querySelector("[data-stop]");
  const busy = (is) => {
    button.setAttribute("aria-busy", String(is));
    stop.hidden = !is;
  };
  form.addEventListener("submit", (event) => {
    if (button.getAttribute("aria-busy") === "true") event.preventDefault();
    else busy(event.submitter?.value !== "load");
  });
  // The browser hangs up, and who reckons for it hears that.
  stop.addEventListener("click", () => {
    window.stop();
    busy(false);
  });
  window.addEventListener("pageshow", () => busy(false));
  for (const example of form.querySelectorAll("[data-fill]")) {
    example.addEventListener("click", () => {
      form.querySelector("[name=source][value=declared]").checked = true;
      fill(form.elements[example.dataset.fill], example.dataset.text);
    });
  }
  for (const each of ["a", "b", "workload"]) {
    form.elements[each].addEventListener("input", () => form.elements[each].removeAttribute("aria-invalid"));
  }
  form.elements.workload.addEventListener("input", () => {
    form.querySelector("[name=source][value=declared]").checked = true;
  });
  const wrong = form.querySelector("[data-line]");
  if (wrong) leadTo(wrong);
  else form.querySelector("[aria-invalid=true]")?.focus();
}
