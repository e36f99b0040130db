/* What a screen reader hears: one message in two seconds at most, the newest. */

const GAP_MS = 2000;
let timer = 0;
let saidAt = -GAP_MS;

export function announce(text) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    document.getElementById('live').textContent = text;
    saidAt = performance.now();
  }, Math.max(0, saidAt + GAP_MS - performance.now()));
}
