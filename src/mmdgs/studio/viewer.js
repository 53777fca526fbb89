// Draws that alternate in one frame, a map that fades in over the mean, and a click on a place.
// Gradio runs this once for a component, whose content may be set anew at any time.
const EVERY = 450; // milliseconds: two changes a second, below what is felt as flashing
let paused = matchMedia("(prefers-reduced-motion: reduce)").matches;
let fade = 0;

function add(parent, name, values = {}) {
  return Object.assign(parent.appendChild(document.createElement(name)), values);
}

function controls(figure) {
  const images = figure.querySelectorAll("img"), caption = add(figure, "figcaption");
  const range = { type: "range", min: 0, step: 1, max: images.length - 1, value: 0 };
  if (figure.matches(".mm-turns")) {
    add(caption, "button", { type: "button" });
    add(caption, "input", { ...range, ariaLabel: "which draw" });
    add(caption, "output", { textContent: images[0].alt });
  } else {
    add(caption, "span", { textContent: images[0].alt });
    add(caption, "span", { textContent: images[1].alt });
    add(caption, "input", { ...range, max: 1, step: 0.01, ariaLabel: `${images[1].alt}, over it` });
  }
}

function turn(figure, place) {
  const frames = figure.querySelectorAll("img");
  frames.forEach((frame, i) => { frame.style.visibility = i === place ? "visible" : "hidden"; });
  figure.querySelector("input").value = place;
  figure.querySelector("output").textContent = frames[place].alt;
}

function settle() {
  for (const figure of element.querySelectorAll(".mm-stack:not(:has(figcaption))")) controls(figure);
  for (const button of element.querySelectorAll(".mm-turns button"))
    button.textContent = paused ? "Play" : "Pause";
  for (const slider of element.querySelectorAll(".mm-fades input")) {
    slider.value = fade;
    slider.closest("figure").querySelectorAll("img")[1].style.opacity = fade;
  }
}

element.addEventListener("input", ({ target }) => {
  if (target.closest(".mm-turns")) {
    paused = true;
    turn(target.closest("figure"), Number(target.value));
  } else if (target.closest(".mm-fades")) {
    fade = Number(target.value);
  }
  settle();
});

element.addEventListener("click", (event) => {
  const frame = event.target.closest(".mm-fades .mm-frame");
  if (event.target.closest(".mm-turns button")) {
    paused = !paused;
    settle();
  } else if (frame) {
    const { left, top, width, height } = frame.getBoundingClientRect();
    const index = [(event.clientX - left) / width, (event.clientY - top) / height];
    trigger("select", { index, value: null });
  }
});

watch("value", settle);
settle();
setInterval(() => {
  if (paused || document.hidden) return;
  for (const figure of element.querySelectorAll(".mm-turns")) {
    const { value, max } = figure.querySelector("input");
    turn(figure, (Number(value) + 1) % (Number(max) + 1));
  }
}, EVERY);
