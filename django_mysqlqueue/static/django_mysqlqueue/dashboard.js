/* Refreshes a page of the queue in place, and makes "select all" and the crosshair of charts work.
   Without it every page works, too: it is then as old as its last load. */
"use strict";
(() => {
  const page = document.querySelector(".mq-page");
  if (!page) return;
  const parsed = async (answer) => new DOMParser().parseFromString(await answer.text(), "text/html");
  const write = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };

  // -- the state on the admin's index, which does not wait for it --
  const showOnIndex = async () => {
    const banner = (await parsed(await fetch(page.dataset.stateOf))).querySelector("[data-state]");
    if (!banner) return;
    page.classList.add(...banner.classList);
    page.querySelector("h2").append(`: ${banner.querySelector("h2").textContent}`);
    page.querySelector("p").prepend(banner.querySelector("bdi") || "", " ");
  };
  if (page.dataset.stateOf) showOnIndex().catch(() => {});

  // -- ticking all rows --
  const boxes = (form) => [...form.querySelectorAll("tbody input[type=checkbox]")];
  const away = (form) => [...form.querySelectorAll("input[data-away]")];
  const count = (form) => {
    const all = form.querySelector(".mq-all");
    if (!all) return;
    const rows = boxes(form);
    const ticked = rows.filter((box) => box.checked).length;
    const gone = away(form).length;
    all.checked = ticked > 0 && ticked === rows.length;
    all.indeterminate = ticked > 0 && ticked < rows.length;
    const told = form.querySelector(".mq-selected");
    if (!told) return;
    write(told, (gone ? told.dataset.more : told.dataset.some).replace("{n}", ticked + gone).replace("{all}", rows.length).replace("{k}", gone));
  };
  for (const form of page.querySelectorAll("form")) count(form);
  document.addEventListener("change", (event) => {
    const target = event.target;
    const form = target.form;
    if (target.matches(".mq-all")) {
      for (const box of boxes(form)) box.checked = target.checked;
      if (!target.checked) for (const one of away(form)) one.remove();
    }
    if (form) count(form);
  });

  // -- the crosshair of charts, which all show the row of the table that is chosen --
  let chosen = null; // Its time: it outlives a refresh.
  let pointed = false; // Whether the mouse has chosen it.
  const rows = () => [...document.querySelectorAll("#mq-values tbody tr")];
  const cross = () => {
    const row = rows().find((one) => one.dataset.at === chosen);
    for (const plot of document.querySelectorAll(".mq-plot")) {
      const line = plot.querySelector(".mq-cross");
      const text = plot.querySelector(".mq-values");
      plot.tabIndex = 0;
      text.setAttribute("aria-live", plot === document.activeElement ? "polite" : "off");
      line.setAttribute("visibility", row ? "visible" : "hidden");
      let said = "";
      if (row) {
        const { left, width } = size(plot);
        const x = String(left + ((Number(row.dataset.place) + 0.5) * width) / rows().length);
        line.setAttribute("x1", x);
        line.setAttribute("x2", x);
        const heads = row.closest("table").tHead.rows[0].cells;
        const values = plot.dataset.columns.split(",").map((column) => `${heads[column].textContent} ${row.cells[column].textContent}`);
        said = [row.cells[0].textContent, ...values].join(" \u00b7 ");
      }
      write(text, said);
    }
  };
  const size = (plot) => {
    const chart = plot.querySelector(".mq-chart");
    const left = Number(chart.dataset.left);
    return { chart, left, width: chart.viewBox.baseVal.width - left };
  };
  const choose = (place) => {
    const number = Math.max(0, Math.min(rows().length - 1, place));
    const row = rows().find((one) => Number(one.dataset.place) === number);
    chosen = row ? row.dataset.at : null;
    cross();
  };
  const point = (event) => {
    const plot = event.target.closest && event.target.closest(".mq-plot");
    if (!plot) return;
    const { chart, left, width } = size(plot);
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * (left + width) - left;
    choose(Math.floor((x / width) * rows().length));
    pointed = event.pointerType === "mouse";
  };
  page.addEventListener("pointermove", point);
  page.addEventListener("pointerdown", point);
  // Not pointerout: a refresh takes the element away from below the pointer, and the browser does not always tell.
  document.addEventListener("pointermove", (event) => {
    if (!pointed || event.pointerType !== "mouse" || (event.target.closest && event.target.closest(".mq-plot"))) return;
    pointed = false;
    chosen = null;
    cross();
  });
  page.addEventListener("keydown", (event) => {
    if (!event.target.matches(".mq-plot")) return;
    pointed = false;
    const row = rows().find((one) => one.dataset.at === chosen);
    const last = rows().length - 1;
    const place = row ? Number(row.dataset.place) : last + 1;
    const places = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: last };
    if (event.key === "Escape") {
      chosen = null;
      cross();
    } else if (event.key in places) {
      event.preventDefault();
      choose(places[event.key]);
    }
  });
  cross();

  // -- the heat map: the mouse has tooltips, the keyboard a line below the map --

  document.addEventListener("focusin", (event) => {
    const text = document.getElementById("mq-heat-value");
    if (text) text.textContent = event.target.closest(".mq-heat a")?.getAttribute("aria-label") || "";
  });

  // -- copying a text: buttons without a function are hidden --
  const offer = () => {
    for (const one of page.querySelectorAll("button[data-copy]")) one.hidden = false;
  };
  offer();
  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("button[data-copy]");
    if (!copy) return;
    const area = document.getElementById(copy.dataset.copy);
    try {
      await navigator.clipboard.writeText(area.value);
    } catch {
      // Without TLS, there is no clipboard.
      area.select();
      if (!document.execCommand("copy")) return;
    }
    copy.textContent = copy.dataset.done;
  });

  const live = document.getElementById("mq-live");
  if (!page.dataset.live || !live) return;
  const button = document.getElementById("mq-pause");
  const select = document.getElementById("mq-interval");
  const state = document.getElementById("mq-state");
  const LATE = 6000; // More than the server waits for a database that does not answer.
  const GIVE_UP = 30000;
  let paused = false;
  let asking = false; // A slow server must not have two refreshes of a page under way.
  let timer = null;

  // Ticks, what is open, what has the focus and how far boxes are scrolled outlive a refresh.
  const remember = () => ({
    ticked: [...live.querySelectorAll("form")].map((form) => [...boxes(form).filter((box) => box.checked), ...away(form)].map((box) => [box.name, box.value])),
    open: new Set([...live.querySelectorAll("details[open][id]")].map((one) => one.id)),
    scrolled: [...live.querySelectorAll(".mq-scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]),
    focus: describe(document.activeElement),
  });
  const describe = (element) => {
    if (!element || !live.contains(element)) return null;
    return `${element.tagName} ${element.id} ${element.name || ""} ${element.value || ""} ${element.getAttribute("href") || ""}`;
  };
  const restore = (kept) => {
    live.querySelectorAll("form").forEach((form, place) => {
      const ticked = new Map((kept.ticked[place] || []).map(([name, value]) => [`${name} ${value}`, [name, value]]));
      for (const box of boxes(form)) box.checked = ticked.delete(`${box.name} ${box.value}`);
      // Rows that are no longer on the page, since others have come before them, stay selected.
      for (const [name, value] of ticked.values()) {
        const one = document.createElement("input");
        Object.assign(one, { type: "hidden", name, value });
        one.dataset.away = "yes";
        form.append(one);
      }
      count(form);
    });
    for (const one of live.querySelectorAll("details[id]")) one.open = kept.open.has(one.id);
    live.querySelectorAll(".mq-scroll, pre").forEach((box, place) => {
      if (kept.scrolled[place]) [box.scrollLeft, box.scrollTop] = kept.scrolled[place];
    });
    if (kept.focus) {
      for (const element of live.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")) {
        if (describe(element) === kept.focus) {
          element.focus({ preventScroll: true });
          break;
        }
      }
    }
  };

  const busy = () => {
    const element = document.activeElement;
    const typing = element && live.contains(element) && element.matches("input:not([type=checkbox]), textarea, select");
    const selection = document.getSelection();
    return typing || (selection && !selection.isCollapsed && live.contains(selection.anchorNode));
  };

  // The state of the queue is in the tab's title and icon, too. A screen reader is told when it changes.
  const stateName = () => live.querySelector("[data-state]")?.dataset.state;
  const showIcon = (address) => {
    let icon = document.getElementById("mq-icon");
    if (!address) return icon?.remove();
    if (!icon) document.head.append((icon = Object.assign(document.createElement("link"), { id: "mq-icon", rel: "icon", type: "image/svg+xml" })));
    if (icon.getAttribute("href") !== address) icon.href = address;
  };

  // -- what is shown is old, or new again --
  const old = document.getElementById("mq-old");
  const age = (reason) => {
    if (paused) return;
    const at = page.dataset.asOf.replace("{time}", live.dataset.at);
    write(old.querySelector("h2"), at);
    write(old.querySelector("bdi"), reason);
    if (old.hidden) document.title = `${at} \u00b7 ${document.title.replace(`${stateName()} \u00b7 `, "")}`;
    showIcon(page.dataset.icon);
    old.hidden = false;
    page.classList.add("mq-aged");
  };
  const renew = (answered) => {
    document.title = answered.title;
    showIcon(answered.getElementById("mq-icon")?.getAttribute("href"));
    old.hidden = true;
    page.classList.remove("mq-aged");
  };

  const show = async (answer) => {
    const answered = await parsed(answer);
    const found = answered.getElementById("mq-live");
    // A redirect, which has the status 0 here, or a page that is not of the queue: to log in.
    if (answer.status === 403 || (!found && answer.status < 300)) return age(page.dataset.ended);
    if (!found || answer.status >= 500) {
      return age(answered.querySelector("[data-state] bdi, .errornote")?.textContent || page.dataset.failed.replace("{status}", answer.status));
    }
    // Paused while the answer was on its way: the page stays as it is, and says that.
    if (paused || busy()) return;
    const kept = remember();
    const before = stateName();
    live.replaceChildren(...found.childNodes);
    live.dataset.at = found.dataset.at;
    cross();
    restore(kept);
    offer();
    renew(answered);
    const after = stateName();
    write(state, after && after !== before ? after : "");
    // The job of the page has ended, for example.
    if (answer.ok && !answered.querySelector(".mq-page").dataset.live) paused = button.hidden = select.hidden = true;
  };
  const refresh = async () => {
    if (asking || paused || document.hidden) return;
    if (busy()) return plan();
    asking = true;
    const stop = new AbortController();
    const timers = [setTimeout(age, LATE, page.dataset.silent), setTimeout(() => stop.abort(), GIVE_UP)];
    try {
      await show(await fetch(location.href, { headers: { "X-Requested-With": "fetch" }, redirect: "manual", signal: stop.signal }));
    } catch {
      age(page.dataset.silent);
    }
    timers.forEach(clearTimeout);
    asking = false;
    plan();
  };
  const plan = () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, Number(select.value || page.dataset.live) * 1000);
  };

  // A browser that stores nothing raises errors.
  const remembered = (value) => {
    try {
      if (value) localStorage.setItem("mq-interval", value);
      return localStorage.getItem("mq-interval");
    } catch {
      return null;
    }
  };
  // A page that is woken has an interval of its own, which is none of the choices.
  select.value = page.dataset.live;
  if (select.value) {
    const chosen = remembered();
    if ([...select.options].some((one) => one.value === chosen)) select.value = chosen;
    select.hidden = false;
  }
  select.addEventListener("change", () => {
    remembered(select.value);
    plan();
  });
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? button.dataset.go : button.dataset.pause;
    write(state, paused ? page.dataset.paused : "");
    refresh();
  });
  document.addEventListener("visibilitychange", refresh);
  plan();
})();
