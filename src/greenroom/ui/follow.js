/* The log of one model while its page is open: the newest lines, followed; given up as soon as the page is left. */

import {call, events, path} from './api.js';
import {put, ui} from './store.js';

const LINES_MAX = 1000;
const HISTORY = 300;
const RETRY_MS = 3000;
const HIDDEN_MS = 60_000; // nobody looks: the connection is given back, and taken up again with the first look
const PUT_MS = 200; // lines come in bursts; the page is painted now and then

let now = null; // {id, lines, stop, note}
let timer = 0;
let hiddenTimer = 0;

document.addEventListener('visibilitychange', () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(rest, HIDDEN_MS);
  else if (now?.isResting) wake(now);
});

function rest() {
  if (!now || now.isResting) return;
  now.stop.abort();
  clearTimeout(now.again);
  now.isResting = true;
}

function wake(mine) {
  Object.assign(mine, {isResting: false, stop: new AbortController(), note: 'reading'});
  follow(mine);
}

export function logOf(id) {
  if (now?.id !== id) open(id);
  return now;
}

export function closeLog() {
  if (!now) return;
  now.stop.abort();
  clearTimeout(now.again);
  now = null;
}

function open(id) {
  closeLog();
  now = {id, lines: [], first: 0, stop: new AbortController(), note: 'reading', again: 0};
  follow(now);
}

async function follow(mine) {
  const {signal} = mine.stop;
  try {
    const response = await call(path(mine.id, `/logs?follow=1&lines=${HISTORY}`), {signal, headers: {Accept: 'text/event-stream'}});
    mine.lines = [];
    mine.note = 'following';
    soon();
    for await (const event of events(response)) {
      if (!event.data) continue;
      mine.lines.push(plain(JSON.parse(event.data).line));
      if (mine.lines.length > LINES_MAX) {
        mine.lines.shift();
        mine.first++;
      }
      if (!ui.held) soon();
    }
    mine.note = 'ended';
  } catch (error) {
    if (signal.aborted) return;
    mine.note = `not readable: ${error.message}`;
  }
  soon();
  if (mine === now && !mine.isResting) mine.again = setTimeout(() => follow(mine), RETRY_MS);
}

function soon() {
  if (timer) return;
  timer = setTimeout(() => {
    timer = 0;
    put();
  }, PUT_MS);
}

/** Text only: colours and other orders to a terminal are taken out. */
// eslint-disable-next-line no-control-regex
const plain = line => String(line).replace(/\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|.)/g, '').replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, '');
