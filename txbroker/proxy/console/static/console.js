// Makes a page live: fetches it periodically and replaces its marked sections. Without this script
// every page works the same, but must be reloaded by hand.
"use strict";

(() => {
  const EVERY_MS = 3000;
  const SLOWEST_MS = 30000;
  const button = document.getElementById("live");
  const sections = () => [...document.querySelectorAll("[data-live][id]")];
  // Pages with a form to fill in or with a result are not refreshed.
  if (!button || sections().length < 2 || !window.fetch) return;

  let on = true;
  let failures = 0;
  let timer = 0;
  let pressed = false;
  const title = () => (document.getElementById("verdict-title") || {}).textContent;
  let spoken = title();

  const show = (text) => {
    button.hidden = false;
    button.textContent = text;
    button.setAttribute("aria-pressed", String(on));
    button.setAttribute("aria-label", on ? `${text}: stop following` : `${text}: follow again`);
  };

  const inUse = (section) => {
    if (pressed) return true;
    const picked = document.getSelection();
    return Boolean(picked) && !picked.isCollapsed && section.contains(picked.anchorNode);
  };

  // The focused element, described so that it can be found in the new section.
  const placeOf = (section) => {
    const focused = document.activeElement;
    if (!focused || focused === section || !section.contains(focused)) return null;
    const alike = (root) =>
      [...root.querySelectorAll(focused.tagName)].filter(
        (e) => e.getAttribute("href") === focused.getAttribute("href")
      );
    const number = alike(section).indexOf(focused);
    return (root) => alike(root)[number];
  };

  const replace = (old, fresh) => {
    const place = placeOf(old);
    for (const open of old.querySelectorAll("details[open][id]")) {
      const same = fresh.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = true;
    }
    const scrolled = [...old.querySelectorAll(".wide")].map((e) => e.scrollLeft);
    // Replace the content, not the section, so that screen readers announce the change.
    old.replaceChildren(...fresh.childNodes);
    old.querySelectorAll(".wide").forEach((e, i) => { e.scrollLeft = scrolled[i] || 0; });
    const there = place && place(old);
    if (there) there.focus({ preventScroll: true });
  };

  const take = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const old of sections()) {
      const found = page.getElementById(old.id);
      if (!found || inUse(old)) continue;
      const fresh = document.importNode(found, true);
      if (fresh.innerHTML !== old.dataset.was) {
        old.dataset.was = fresh.innerHTML;
        replace(old, fresh);
      }
    }
    // Ages change all the time; announce only the headline.
    if (title() !== spoken) {
      spoken = title();
      document.getElementById("spoken").textContent = spoken.trim();
    }
  };

  const look = async () => {
    try {
      const answer = await fetch(location.href.split("#")[0], {
        headers: { accept: "text/html" },
        signal: AbortSignal.timeout(10000),
      });
      const text = await answer.text();
      // Stopped meanwhile: keep the page as it is.
      if (!on) return;
      if (answer.redirected) {
        // The login has expired: follow the redirect.
        location.reload();
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      take(text);
      failures = 0;
      show("Live");
    } catch {
      if (!on) return;
      failures += 1;
      show("No answer, trying again");
    }
    again();
  };

  const again = () => {
    clearTimeout(timer);
    if (on && !document.hidden) {
      timer = setTimeout(look, Math.min(EVERY_MS * 2 ** failures, SLOWEST_MS));
    }
  };

  button.addEventListener("click", () => {
    on = !on;
    show(on ? "Live" : "Stopped");
    again();
  });
  document.addEventListener("visibilitychange", again);
  // Replace nothing while a pointer is down.
  document.addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel"]) {
    document.addEventListener(end, () => { setTimeout(() => { pressed = false; }); });
  }
  show("Live");
  again();
})();
