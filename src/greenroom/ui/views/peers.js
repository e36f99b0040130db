/* Other servers that this one passes requests on to: how each does, and what it was asked lately. */

import {h} from '../paint.js';
import {cell, cols, glyph, head} from '../parts.js';
import {many, sec} from '../words.js';

const NAMED_MAX = 4; // of a peer's models, in its row

const isWell = one => one.healthy && one.circuit !== 'open';
const stateOf = one => (!one.healthy ? 'does not answer' : one.circuit === 'open' ? 'left alone for a while' : 'answers');

export function summary(peers) {
  const well = peers.filter(isWell).length;
  return well === peers.length ? `${many(well, 'other server')}${well === 1 ? ' answers' : ' answer'}` : `${well} of ${peers.length} answer`;
}

const WIDTHS = [25, 22, 29, 8, 8, 8];
const HEADINGS = [['peer', '', true], ['state', '', true], ['models'], ['in flight', 'n'], ['requests', 'n opt'], ['failures', 'n opt']];

export function peers(list) {
  return h('div', {class: 'wide'}, h('table', {class: 'peers'}, h('caption', {class: 'vh'}, 'Peers'), cols(WIDTHS), head(HEADINGS), h('tbody', {}, list.map(row))));
}

function row(one) {
  const models = one.models || [];
  const more = models.length - NAMED_MAX;
  const unwell = one.models_unwell || [];
  return [h('tr', {key: one.id},
    cell([h('span', {class: 'name', title: one.id}, one.id), one.proxy ? h('small', {class: 'addr'}, one.proxy) : null]),
    cell(h('span', {class: `st s-${isWell(one) ? 'ready' : 'failed'}`}, glyph(isWell(one) ? 'ready' : 'failed'), h('span', {}, stateOf(one)), one.since_s == null ? '' : h('small', {class: 'opt'}, ` for ${sec(one.since_s)}`))),
    cell(h('span', {title: more > 0 ? models.join('\n') : null}, models.slice(0, NAMED_MAX).join(', '), more > 0 ? ` and ${more} more` : ''), 'wrap'),
    cell([one.in_flight, h('span', {class: 'unit'}, ' in flight')], 'n'), cell(one.requests, 'n opt'), cell(h('span', {class: one.failures ? 'warn' : ''}, one.failures), 'n opt')),
  said(one, unwell)];
}

/** The last error stays as long as it is one: afterwards it is history, and says so. */
function said(one, unwell) {
  if (!one.last_error && !unwell.length) return null;
  const ago = one.last_error_s == null ? '' : `, ${sec(one.last_error_s)} ago`;
  return h('tr', {key: `${one.id}\nword`, class: 'wordrow'}, h('td', {colspan: '6'},
    unwell.length ? h('p', {class: 'word warn'}, `Rested there: ${unwell.join(', ')}.`) : null,
    one.last_error ? h('p', {class: `word ${isWell(one) ? 'mut' : 'bad'}`}, `Last error${ago}: ${one.last_error}`) : null));
}
