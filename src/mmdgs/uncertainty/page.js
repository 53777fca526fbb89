// The page's own script: draws in turn, the overlay's strength, components that move, the region at
// a click.
"use strict";
const at = id => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

function flicker(stage) {
  const draws = [...stage.querySelectorAll("img.draw")], button = at("play"), slider = at("draw");
  let shown = 0, timer = null;
  const show = i => {
    shown = i % draws.length;
    draws.forEach((img, j) => { img.style.opacity = j === shown ? 1 : 0; });
    slider.value = shown + 1;
    at("number").textContent = shown + 1;
  };
  const run = on => {
    clearInterval(timer);
    timer = on ? setInterval(() => show(shown + 1), 600) : null;
    button.textContent = on ? "Pause" : "Play";
  };
  button.onclick = () => run(timer === null);
  slider.oninput = () => { run(false); show(slider.value - 1); };
  show(0);
  run(!still && draws.length > 1);
}

function fade(slider) {
  const set = () => { at("overlay").style.opacity = slider.value / 100; };
  slider.oninput = set;
  set();
}

function sway(card) {
  const steps = [...card.querySelectorAll(".walk img")].slice(0, 5);
  const [img, slider] = card.querySelectorAll(".sway > *");
  let place = 2, move = 1;
  const show = i => { place = +i; slider.value = place; img.src = steps[place].src; };
  const timer = still ? null : setInterval(() => {
    if (place === 0) move = 1;
    if (place === 4) move = -1;
    show(place + move);
  }, 300);
  slider.oninput = () => { clearInterval(timer); show(slider.value); };
  show(2);
}

function regions(stage) {
  const width = +stage.dataset.width, height = +stage.dataset.height, box = at("box");
  const side = +stage.dataset.side, own = JSON.parse(stage.dataset.region || "null");
  const place = (x, y, w, h) => {
    box.hidden = false;
    box.style.cssText = `left:${100 * x / width}%;top:${100 * y / height}%;` +
      `width:${100 * w / width}%;height:${100 * h / height}%`;
  };
  if (own) place(...own);
  stage.onclick = event => {
    const frame = stage.getBoundingClientRect(), w = Math.min(side, width), h = Math.min(side, height);
    const px = Math.min(width - 1, Math.floor((event.clientX - frame.left) / frame.width * width));
    const py = Math.min(height - 1, Math.floor((event.clientY - frame.top) / frame.height * height));
    if (own && px >= own[0] && py >= own[1] && px < own[0] + own[2] && py < own[1] + own[3]) {
      place(...own);
      at("where").hidden = true;
      at("components").scrollIntoView({behavior: "auto"});
      return;
    }
    const x = Math.max(0, Math.min(width - w, Math.round(px - w / 2)));
    const y = Math.max(0, Math.min(height - h, Math.round(py - h / 2)));
    place(x, y, w, h);
    at("where").hidden = false;
    at("region").textContent = `${x},${y},${w},${h}`;
  };
}

if (at("play")) flicker(at("draws"));
if (at("fade")) fade(at("fade"));
document.querySelectorAll(".card").forEach(sway);
regions(at("mean"));
