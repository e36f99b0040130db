/* To the clipboard; where the browser denies that (plain HTTP), the text is selected for the user to copy. */

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    say(button, 'Copied', label);
  } catch {
    fallback(text, button, label);
  }
}

function fallback(text, button, label) {
  const field = document.createElement('textarea');
  field.value = text;
  field.className = 'vh';
  field.setAttribute('aria-label', 'Text to copy');
  (button.closest('dialog') || document.body).append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  button.focus();
  say(button, done ? 'Copied' : 'Not possible here', label);
}

function say(button, text, label) {
  const node = button.firstChild;
  if (node) node.data = text;
  setTimeout(() => {
    if (node?.data === text) node.data = label;
  }, 1500);
}
