/* The page: which view the address asks for, the frame around it, and one painting a frame at most. */

import {setUp as setUpAsk} from './ask.js';
import {measureBars} from './bar.js';
import {moveHot, setUp as setUpKeys, toggleShortcuts, toggleTheme} from './keys.js';
import {reconnect, refresh, start} from './live.js';
import {h, paint} from './paint.js';
import {show} from './state.js';
import {isAway, may, onChange, put, route, serverNow, store, ui} from './store.js';
import {measureTimeline} from './timeline.js';
import {advice} from './views/advice.js';
import {model} from './views/model.js';
import {models} from './views/models.js';
import {play} from './views/play.js';
import {requests} from './views/requests.js';
import {stage} from './views/stage.js';
import {denied, empty, failing, loading} from './views/states.js';
import {clock, sec} from './words.js';

const VIEWS = {stage, requests, models, model, advice, play};
const TABS = [['stage', 'Stage'], ['requests', 'Requests'], ['models', 'Models'], ['advice', 'Advice'], ['play', 'Playground']];
const $ = id => document.getElementById(id);

let isPlanned = false;
let shownPage = '';

function plan() {
  if (isPlanned) return;
  isPlanned = true;
  if (document.hidden) setTimeout(draw, 200); // no frames come to a hidden tab; its title still tells who waits
  else requestAnimationFrame(draw);
}

function draw() {
  isPlanned = false;
  const began = performance.now();
  const at = route();
  const page = VIEWS[at.page] ? at.page : 'stage';
  const held = heldPlace();
  document.body.classList.toggle('stale', store.link === 'lost' || store.link === 'error');
  paint($('tabs'), tabs(page));
  paint($('meta'), meta());
  paint($('notice'), notice());
  paint($('view'), h('div', {key: `${page}\n${page === 'model' ? at.id : ''}`, class: `p-${page}`}, content(page, at)));
  paint($('foot'), foot());
  document.title = title();
  keepPlace(held);
  shownPage = page;
  moveHot();
  const bars = measureBars();
  if (measureTimeline() || bars) plan(); // the first painting knows the width only now
  performance.measure('greenroom-draw', {start: began, end: performance.now()}); // for observers; nothing is kept
  performance.clearMeasures('greenroom-draw');
}

function content(page, at) {
  if (store.link === 'denied' && page !== 'play') return denied();
  if (page === 'play') return play(store.picture, at);
  if (!may('view')) return denied();
  if (!store.picture) return store.link === 'error' ? failing() : loading();
  if (!store.picture.models.length && !store.picture.peers.length) return empty(store.picture);
  return VIEWS[page](store.picture, at);
}

// ---- the frame

function tabs(page) {
  const list = store.link === 'denied' || !may('view') ? TABS.filter(([id]) => id === 'play') : TABS;
  const open = store.picture?.adviceCount;
  return list.map(([id, text]) => h('a', {key: id, href: `#/${id}`, 'aria-current': id === page || (id === 'models' && page === 'model') ? 'page' : null},
    text, id === 'advice' && open ? h('i', {}, open, h('span', {class: 'vh'}, ' open')) : null));
}

const LINKS = {connecting: 'connecting', live: 'live', lost: 'lost, retrying', error: 'failing, retrying', denied: 'no access'};

function meta() {
  const key = store.me?.key_name;
  const mine = key ? `key ${key}${may('view') && !may('admin') ? ' (look only)' : ''}` : '';
  return [
    h('span', {key: 'link', class: `link ${isAway() ? 'off' : ui.held ? 'held' : ''}`}, ui.held && !isAway() ? 'held' : LINKS[store.link]),
    store.picture ? h('span', {key: 'when', class: 'when'}, isAway() && store.lostAt ? `as of ${clock(store.lostAt)}` : clock(serverNow())) : null,
    mine ? h('span', {key: 'who', class: 'who'}, mine) : null,
    h('button', {key: 'theme', type: 'button', class: 'quiet', onclick: toggleTheme, 'aria-label': 'Switch between dark and light'},
      document.documentElement.dataset.theme === 'dark' ? 'Light' : 'Dark'),
  ];
}

function notice() {
  if (!store.picture) return null;
  if (store.link === 'lost' || store.link === 'error') {
    const next = store.retryAt ? Math.max(0, Math.ceil((store.retryAt - performance.now()) / 1000)) : 0;
    const reason = store.link === 'error' ? ` ${store.problem.message}` : '';
    return h('div', {class: 'notice', role: 'status'}, h('b', {}, `No connection since ${clock(store.lostAt)}.`),
      h('span', {'aria-live': 'off'}, `The picture below is ${sec(Math.max(1, Math.round(serverNow() - store.lostAt)))} old.${reason} Buttons wait. ${next ? `Next try in ${next} s.` : 'Trying…'}`),
      h('button', {type: 'button', class: 'quiet', onclick: reconnect}, 'Try now'));
  }
  if (ui.held) {
    return h('div', {class: 'notice'}, h('b', {}, 'Held still.'), h('span', {}, 'The server goes on; this picture does not.'),
      h('button', {type: 'button', class: 'quiet', onclick: hold}, 'Go on'));
  }
  return null;
}

function hold() {
  ui.held = !ui.held;
  put();
  if (!ui.held) refresh();
}

function foot() {
  const version = store.picture?.version;
  return [
    h('span', {key: 'version'}, version ? `greenroom ${version} · up ${sec(store.picture.uptime_s)}` : 'greenroom'),
    h('span', {key: 'keys', class: 'keys'}, h('kbd', {}, '/'), ' find ', h('kbd', {}, '1'), '–', h('kbd', {}, '5'), ' sections ', h('kbd', {}, 't'), ' theme ', h('kbd', {}, 'space'), ' hold'),
    h('button', {key: 'toggle', type: 'button', class: 'quiet', 'aria-pressed': String(ui.shortcuts), onclick: toggleShortcuts}, ui.shortcuts ? 'Single keys: on' : 'Single keys: off'),
  ];
}

function title() {
  const waiting = store.link === 'live' && store.picture ? store.picture.waiting : 0;
  return `${waiting ? `(${waiting}) ` : ''}greenroom`;
}

// ---- focus goes with a model whose row moved to another table

function heldPlace() {
  const active = document.activeElement;
  return active && active !== document.body ? {active, model: active.closest('[data-m]')?.dataset.m} : null;
}

function keepPlace(held) {
  if (!held?.model || held.active.isConnected) return;
  const row = [...document.querySelectorAll('#view tr[data-m]')].find(one => one.dataset.m === held.model);
  row?.querySelector('button:not(:disabled), a')?.focus({preventScroll: true});
}

// ---- the beginning

function go() {
  const moved = route().page !== shownPage;
  draw();
  if (moved) {
    scrollTo(0, 0);
    $('view').focus({preventScroll: true});
  }
}

onChange(plan);
addEventListener('hashchange', go);
addEventListener('resize', plan);
setInterval(() => {
  if (!store.picture || document.hidden || ui.held) return;
  if (store.link === 'live') show(); // ages and the clock go on
  else plan();
}, 1000);
setUpAsk();
setUpKeys({tabs: TABS, hold, plan});
draw();
start();
