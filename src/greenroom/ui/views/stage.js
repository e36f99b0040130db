/* Stage: what an operator would say aloud, then the picture of the memory, then how it came to be. */

import {buttons, wordFor} from '../acts.js';
import {device} from '../bar.js';
import {h, lazy} from '../paint.js';
import {cell, cols, glyph, head, isFound, nameOf, pinMark, pips, rateOf, stateOf, unavailable} from '../parts.js';
import {fetchFault, lockedBecause, modelHref, store, ui} from '../store.js';
import {spanOf, timeline} from '../timeline.js';
import {about, ended, families, gib, many, sec} from '../words.js';
import {aside} from './aside.js';
import {arrival} from './files.js';
import {peers, summary} from './peers.js';

const TILES_MAX = 24; // more models at home are folded by family

export function stage(picture) {
  const on = picture.models.filter(one => one.place === 'stage');
  const green = picture.models.filter(one => one.place === 'green');
  const home = picture.models.filter(one => one.place === 'home');
  return [
    sentence(picture, on, green, home),
    h('div', {class: 'page'},
      h('div', {class: 'acting'}, onStage(picture, on), greenRoom(picture, green), past(picture), picture.models.length ? atHome(home) : null, peersOf(picture)),
      aside(picture)),
  ];
}

// ---- the sentence: waits, places, the one worst thing

function sentence(picture, on, green, home) {
  const first = picture.queue.find(one => one.short_mib > 0) || picture.queue[0] || forFiles(picture.late[0]);
  const asleep = green.filter(one => one.state === 'asleep').length;
  const count = first?.waiting ?? first?.m.queued;
  const more = first ? picture.waiting - count : 0;
  const eta = first?.eta_s ?? first?.m.eta_s;
  return h('h1', {class: 'line'},
    first ? [h('b', {}, many(count, 'request')), count === 1 ? ' waits for ' : ' wait for ', first.isFile ? 'the files of ' : '', nameOf(first.model, ''),
      eta == null ? '' : [', about ', h('b', {}, sec(Math.max(1, Math.round(eta))))], more > 0 ? ` (${more} more for others). ` : '. ']
      : [h('b', {}, 'Nobody waits.'), ' '],
    `${on.length + green.length - asleep} on stage, ${asleep} asleep, ${home.length} at home.`, worst(picture, home));
}

const forFiles = m => (m ? {m, model: m.id, eta_s: m.fetch.eta_s, waiting: m.fetch.waiting, isFile: true} : undefined);

function worst(picture, home) {
  const told = picture.headline;
  if (told?.text) return [' ', h('a', {href: told.link?.startsWith('#/') ? told.link : '#/advice', class: told.severity === 'bad' ? 'bad' : 'warn'}, ended(told.text))];
  const failed = home.filter(one => one.state === 'failed' || one.quarantined);
  const down = picture.peers.filter(one => !one.healthy);
  if (!failed.length && down.length) return [' ', h('span', {class: 'warn'}, down.length > 1 ? `${many(down.length, 'peer')} do not answer.` : `Peer ${down[0].id} does not answer.`)];
  if (!failed.length) return null;
  return [' ', h('a', {href: modelHref(failed[0].id), class: 'bad'}, failed[0].id, failed.length > 1 ? ` and ${many(failed.length - 1, 'other')} fail` : ' fails to start'), '.'];
}

// ---- on stage

const NEXT = {asleep: 'sleeps', stopped: 'stops'}; // the step of the idle ladder that comes next
const CAST = [14, 23, 8, 9, 12, 7, 11, 0];
const note = parts => h('small', {class: 'opt'}, parts.filter(Boolean).map(text => ` · ${text}`));

function band(id, title, small, ...body) {
  return h('section', {class: 'band', key: id, 'aria-labelledby': `h-${id}`}, h('header', {}, h('h2', {id: `h-${id}`}, title), h('small', {}, small)), h('div', {}, body));
}

function onStage(picture, on) {
  const ready = on.filter(one => one.state === 'ready').length;
  const small = !on.length ? 'nobody holds memory' : ready === 1 ? '1 answers at once' : `${ready} answer at once`;
  return band('stage', 'On stage', small, picture.cards.map(d => {
    const here = on.filter(one => one.devices.includes(d.id));
    return h('div', {key: d.id, class: 'pair'}, device(d, picture), here.length ? cast(d, here) : null);
  }), picture.cards.length ? null : unavailable('No device was found.', 'Name one in greenroom.yaml under devices, or look at `greenroom check`.'));
}

function cast(d, here) {
  const headings = [['model', '', true], ['state', '', true], ['reserved', 'n'], ['measured', 'n opt'], ['slots', 'gap'], ['waiting', 'n'], ['speed', 'n opt'], ['actions', 'acts', true]];
  return h('div', {class: 'wide'}, h('table', {class: 'cast'}, h('caption', {class: 'vh'}, `Models on ${d.id}, GiB`), cols(CAST), head(headings), h('tbody', {}, here.map(m => castRow(m, d)))));
}

function castRow(m, d) {
  const piece = d.pieces.find(one => one.model === m);
  const over = piece?.fill != null && piece.fill > piece.size + 52;
  const remarks = [m.note || (m.state !== 'ready' && m.expected_s > 0 ? about(m.expected_s) : ''), m.state === 'ready' && !m.inFlight && m.idle_s > 1 ? `idle ${sec(m.idle_s)}` : '',
    nextOf(m)];
  return [h('tr', {key: m.id, 'data-m': m.id},
    cell([nameOf(m.id), pinMark(m)]), cell([stateOf(m), note(remarks)]), cell(gib(piece?.size), 'n'),
    cell(h('span', {class: over ? 'bad' : ''}, gib(piece?.fill)), 'n opt'), cell(pips(m), 'gap'), cell(m.queued || '', 'n'), cell(rateOf(m), 'n opt'), cell(buttons(m), 'acts')),
  wordRow(m)];
}

const nextOf = m => (m.next?.state ? `${NEXT[m.next.state] || m.next.state} in ${sec(m.next.in_s)}` : '');

function wordRow(m) {
  const word = wordFor(m.id);
  return word ? h('tr', {key: `${m.id}\nword`, class: 'wordrow'}, h('td', {colspan: '8'}, word)) : null;
}

// ---- the green room

function greenRoom(picture, green) {
  const asleep = green.filter(one => one.state === 'asleep').length;
  const small = asleep ? `${asleep} asleep, process alive` : 'nobody sleeps';
  if (!picture.ram && !green.length) return null;
  const headings = [['model', '', true], ['state', '', true], ['host RAM', 'n'], ['on device', 'n opt'], ['wakes in', 'n'], ['idle', 'n opt'], ['more', 'opt', true], ['actions', 'acts', true]];
  return band('green', 'Green room', small, picture.ram ? device(picture.ram, picture, 'sleepers and CPU engines') : null,
    green.length ? h('div', {class: 'wide'}, h('table', {class: 'cast'}, h('caption', {class: 'vh'}, 'Models in the green room, GiB'), cols(CAST), head(headings), h('tbody', {}, green.map(m => greenRow(m, picture)))))
      : h('p', {class: 'mut hint'}, 'A model that has to leave rests here, if its engine can sleep: awake again in seconds.'));
}

function greenRow(m, picture) {
  const cpu = m.state !== 'asleep';
  const held = picture.cards.reduce((a, d) => a + d.pieces.filter(one => one.model === m).reduce((b, one) => b + one.size, 0), 0);
  return [h('tr', {key: m.id, 'data-m': m.id},
    cell([nameOf(m.id), pinMark(m)]), cell([stateOf(m), note([cpu ? 'on CPU' : '', m.queued ? `${m.queued} waiting` : nextOf(m)])]), cell(gib(m.host_mib), 'n'),
    cell(cpu ? '' : gib(held), 'n opt'), cell(cpu ? 'now' : about(m.wake_s), 'n'), cell(m.idle_s == null ? '' : sec(m.idle_s), 'n opt'), cell('', 'opt'), cell(buttons(m), 'acts')),
  wordRow(m)];
}

// ---- the last quarter of an hour

const SIGNS = [['k-gate', 'waited for the gate'], ['k-load', 'waited for sleep, wake, load'], ['k-move', 'in transition'], ['k-drain', 'draining'], ['k-sleep', 'asleep, residue'], ['k-swap', 'swap']];

function past(picture) {
  const body = store.timeline === undefined ? h('p', {class: 'mut'}, 'Reading…')
    : store.timeline === null ? unavailable('Not available yet.', 'This server keeps no timeline; a newer one shows here who held which memory, and who waited for it.')
      : [timeline(picture), h('p', {class: 'legend signs'}, SIGNS.map(([cls, text]) => h('span', {}, h('i', {class: cls}), text)))];
  return band('time', `Last ${Math.round(spanOf(picture) / 60)} min`, 'who held which memory; waits on top', body);
}

// ---- at home

function atHome(home) {
  const found = home.filter(isFound);
  const absent = home.filter(one => one.absent).length;
  const small = ui.find ? `${found.length} of ${home.length} match` : `${home.length - absent} stopped${absent ? `, ${absent} not on this host` : ''}; time to first answer and need`;
  const body = !home.length ? h('p', {class: 'mut'}, 'Every model is up.')
    : !found.length ? h('p', {class: 'mut'}, `No stopped model matches “${ui.find}”.`)
      : found.length > TILES_MAX && !ui.find ? folded(found) : h('div', {class: 'home'}, found.map(tile));
  return band('home', 'At home', small, body);
}

function folded(found) {
  return h('div', {class: 'fam'}, families(found).map(([name, list]) => lazy(name, [list.length, ...list], () => {
    const needs = list.map(one => one.need_mib).filter(one => one != null);
    const range = needs.length ? ` · ${gib(Math.min(...needs))} to ${gib(Math.max(...needs))} GiB` : '';
    return h('details', {}, h('summary', {}, h('b', {}, name), h('small', {}, `${list.length}${range}`)), h('div', {class: 'home'}, list.map(tile)));
  })));
}

function peersOf(picture) {
  return picture.peers.length ? band('peers', 'Peers', summary(picture.peers), peers(picture.peers)) : null;
}

function tile(m) {
  if (m.absent) return absentTile(m, fetchFault(m.id));
  return lazy(m.id, [m, !!lockedBecause()], () => h('a', {href: modelHref(m.id), 'data-m': m.id, 'data-tip': m.trouble},
    h('span', {class: `st s-${m.state}`}, glyph(m.state)), h('span', {class: 'name'}, m.id), m.pinned ? glyph('pin', 'mut') : null,
    m.state === 'failed' ? h('small', {class: 'bad'}, m.quarantined ? 'keeps failing' : m.retry_s ? `again in ${sec(Math.ceil(m.retry_s))}` : 'failed')
      : m.blocked || m.failing ? h('small', {class: 'warn'}, m.blocked ? 'cannot start' : 'failed last time') : h('small', {}, `${about(m.cold_s)} · ${gib(m.need_mib)} GiB`)));
}

function absentTile(m, fault) {
  return lazy(m.id, [m, fault, m.absent], () => h('a', {href: modelHref(m.id), 'data-m': m.id, 'data-tip': [m.reference, fault].filter(Boolean).join('\n') || null,
    class: m.fetch ? 'coming' : null, style: m.fetch ? {'--d': `${((m.fetch.share || 0) * 100).toFixed(1)}%`} : {}},
  h('span', {class: `st s-${m.face}`}, glyph(m.face)), h('span', {class: 'name'}, m.id), m.pinned ? glyph('pin', 'mut') : null,
  fault && !m.fetch ? h('small', {class: 'warn'}, 'could not be fetched') : h('small', {}, arrival(m))));
}
