/* Pointer, keyboard and theme: what is hovered is marked everywhere, single keys move about, the timeline is read aloud. */

import {announce} from './announce.js';
import {modelHref, put, store, ui} from './store.js';
import {atFraction, cursorFraction, moveCursor, stepCursor} from './timeline.js';
import {isFound} from './parts.js';

const STEP_S = 5;
const $ = id => document.getElementById(id);
let hot = null;

export function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === 'dark' ? 'light' : 'dark';
  keep('greenroom-theme', root.dataset.theme);
  put();
}

/** Single letters can be switched off, for those who speak to their computer. */
export function toggleShortcuts() {
  ui.shortcuts = !ui.shortcuts;
  keep('greenroom-keys', ui.shortcuts ? '' : 'off');
  put();
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch { /* storage is off */ }
}

export function setUp({tabs, hold, plan}) {
  try {
    ui.shortcuts = localStorage.getItem('greenroom-keys') !== 'off';
  } catch { /* storage is off */ }
  document.addEventListener('pointermove', onPointer);
  document.addEventListener('pointerleave', () => tip(''));
  document.addEventListener('focusin', onFocus);
  document.addEventListener('keydown', event => onKey(event, tabs, hold));
  const find = $('find');
  find.addEventListener('input', () => {
    ui.find = find.value.trim();
    plan();
  });
  find.addEventListener('keydown', event => {
    if (event.key !== 'Enter') return;
    const first = store.picture?.models.find(isFound);
    if (first) location.hash = modelHref(first.id);
  });
}

// ---- what is pointed at

function onPointer(event) {
  const {target} = event;
  const told = target.closest?.('[data-tip]')?.dataset.tip || '';
  const line = target.closest?.('#tl');
  let text = told;
  if (line) {
    const box = line.getBoundingClientRect();
    const then = moveCursor(atFraction((event.clientX - box.left) / box.width));
    text = told ? `${told}\n\nat ${then}` : then;
  } else if (document.activeElement?.id !== 'tl') {
    moveCursor(null);
  }
  tip(text, event.clientX, event.clientY);
  mark(target.closest?.('[data-m]')?.dataset.m || null);
}

function onFocus(event) {
  const at = event.target.closest('[data-tip]');
  mark(event.target.closest('[data-m]')?.dataset.m || null);
  if (!at || !event.target.matches(':focus-visible')) return tip('');
  const box = at.getBoundingClientRect();
  return tip(at.dataset.tip, box.left, box.bottom - 12);
}

function mark(id) {
  if (id === hot) return;
  hot = id;
  moveHot();
}

/** Marks the model that is pointed at, wherever it stands now. */
export function moveHot() {
  for (const el of document.querySelectorAll('[data-hot]')) if (el.dataset.m !== hot) el.removeAttribute('data-hot');
  if (hot == null) return;
  for (const el of document.querySelectorAll('[data-m]')) if (el.dataset.m === hot) el.setAttribute('data-hot', '');
}

function tip(text, x = 0, y = 0) {
  const el = $('tip');
  el.hidden = !text;
  if (!text) return;
  if (el.textContent !== text) el.textContent = text;
  const box = el.getBoundingClientRect();
  el.style.setProperty('left', `${Math.max(6, Math.min(innerWidth - box.width - 8, x + 14))}px`);
  el.style.setProperty('top', `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`);
}

// ---- keys

function onKey(event, tabs, hold) {
  const {target, key} = event;
  if (target.id === 'tl' && (key === 'ArrowLeft' || key === 'ArrowRight')) return readOn(event);
  if (key === 'Escape') return escape(target);
  if (!ui.shortcuts || event.ctrlKey || event.metaKey || event.altKey || $('ask').open || target.closest('input, textarea, select, [contenteditable]')) return undefined;
  if (key === '/') {
    event.preventDefault();
    $('find').focus();
  } else if (/^[1-9]$/.test(key) && tabs[key - 1]) {
    location.hash = `#/${tabs[key - 1][0]}`;
  } else if (key === 't') {
    toggleTheme();
  } else if (key === ' ' && target.matches('body, main')) {
    event.preventDefault();
    hold();
  }
  return undefined;
}

function readOn(event) {
  event.preventDefault();
  const text = stepCursor(event.key === 'ArrowLeft' ? -STEP_S : STEP_S);
  const box = event.target.getBoundingClientRect();
  tip(text, box.left + cursorFraction() * box.width, box.top + 20);
  announce(text.replaceAll('\n', '; '));
}

function escape(target) {
  tip('');
  if (target.id !== 'find') return;
  ui.find = target.value = '';
  target.blur();
  put();
}
