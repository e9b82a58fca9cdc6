"use strict";

const SHOWN = 100;  // rows
const RETRY_MS = 30000;  // after a response that is not a stream: no permission, or too many streams
const body = document.getElementById("commits");
const status = document.getElementById("status");
let last = null;

function show(state, text) {
  status.dataset.state = state;
  status.textContent = text;
}

function add(cells, className = "") {
  const row = body.insertRow(0);
  row.className = className;
  for (const text of cells) {
    row.insertCell().textContent = text;  // never innerHTML: the texts are the publishers'
  }
  while (body.rows.length > SHOWN) {
    body.deleteRow(-1);
  }
}

function connect() {
  // A new EventSource cannot send Last-Event-ID; the browser does that itself when it connects again.
  const source = new EventSource(body.dataset.stream + (last === null ? "" : `?offset=${last + 1}`));
  source.onopen = () => show("live", "Live");
  source.onmessage = (event) => {
    last = Number(event.lastEventId);
    const commit = JSON.parse(event.data);
    add([commit.offset, commit.repository, commit.sequence, commit.sha, commit.files]);
  };
  // At the beginning, and now and then: how far the stream has come.
  source.addEventListener("position", (event) => {
    last = Number(event.lastEventId);
  });
  source.addEventListener("gap", (event) => {
    last = Number(event.lastEventId);
    const gap = JSON.parse(event.data).gap;
    const lost = gap.truncated
      ? `… the log has lost its messages from offset ${gap.after + 1} to ${gap.until}; others get these offsets`
      : `… messages up to offset ${gap.until} were deleted before this page could show them`;
    add([lost], "gap");
    body.rows[0].cells[0].colSpan = 5;
  });
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      show("stopped", "The server refuses the stream. Trying again in half a minute …");
      setTimeout(connect, RETRY_MS);
    } else {
      show("waiting", "Connection lost. Connecting again …");
    }
  };
}

connect();
