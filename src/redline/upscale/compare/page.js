"use strict";

// The maximum distance at which a pointer grabs the divider, and how far an arrow key moves the image.
const NEAR_PX = 26, STEP_PX = 48;

function watch(frame) {
  const range = frame.querySelector("input");
  const button = frame.parentElement.querySelector("button");
  // `x`, `y`: the top left corner of the image at 100%; `width`, `height`: its size; in CSS pixels of the frame.
  let actual = false, x = 0, y = 0, width = 0, height = 0, drag = null;

  function divide(percent) {
    const at = Math.min(100, Math.max(0, percent));
    frame.style.setProperty("--at", at + "%");
    range.value = at;
    range.setAttribute("aria-valuetext", Math.round(at) + "% before");
  }

  function move(toX, toY) {
    const within = (to, size, room) => size <= room ? (room - size) / 2 : Math.min(0, Math.max(room - size, to));
    // Rounds the position to whole screen pixels, because the browser blurs an image at a fractional position.
    const onPixel = (length) => Math.round(length * devicePixelRatio) / devicePixelRatio;
    x = onPixel(within(toX, width, frame.clientWidth));
    y = onPixel(within(toY, height, frame.clientHeight));
    for (const [name, value] of [["--x", x], ["--y", y], ["--w", width], ["--h", height]])
      frame.style.setProperty(name, value + "px");
  }

  // Shows one image pixel per screen pixel, and moves the point at these relative coordinates to (atX, atY).
  function zoom(on, shareX, shareY, atX, atY) {
    actual = on;
    width = frame.dataset.width / devicePixelRatio;
    height = frame.dataset.height / devicePixelRatio;
    frame.classList.toggle("actual", on);
    frame.classList.toggle("movable", on && (width > frame.clientWidth + 1 || height > frame.clientHeight + 1));
    if (button) {
      button.setAttribute("aria-pressed", on);
      button.hidden = Math.abs(width - frame.clientWidth) <= 1;  // the image is shown at 100% already
    }
    if (on) move(atX - shareX * width, atY - shareY * height);
  }

  function zoomToDetail(on) {
    zoom(on, frame.dataset.focusX, frame.dataset.focusY, frame.clientWidth / 2, frame.clientHeight / 2);
  }

  function place(event) {
    const box = frame.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width, box.height];
  }

  frame.addEventListener("pointerdown", (event) => {
    if (event.button || !event.isPrimary) return;
    const [atX, atY, room] = place(event);
    const near = Math.abs(atX - range.value / 100 * room) < NEAR_PX;
    const moves = frame.classList.contains("movable") && !near;
    // A finger may scroll the page, so the divider follows a finger only after a sideways movement.
    drag = { moves, fromX: x - atX, fromY: y - atY, atX, atY, waits: event.pointerType === "touch" };
    frame.classList.add(moves ? "moving" : "dividing");
    frame.setPointerCapture(event.pointerId);
    if (!moves && !drag.waits) divide(atX / room * 100);
  });
  frame.addEventListener("pointermove", (event) => {
    const [atX, atY, room] = place(event);
    if (drag && drag.waits) drag.waits = Math.abs(atX - drag.atX) <= Math.abs(atY - drag.atY);
    if (drag && drag.moves) move(drag.fromX + atX, drag.fromY + atY);
    else if (drag && !drag.waits) divide(atX / room * 100);
    else if (!drag) frame.classList.toggle("dividing", Math.abs(atX - range.value / 100 * room) < NEAR_PX);
  });
  frame.addEventListener("pointerup", (event) => {
    const [atX, , room] = place(event);
    if (drag && !drag.moves) divide(atX / room * 100);
    range.focus({ preventScroll: true });
  });
  for (const name of ["pointerup", "pointercancel"])
    frame.addEventListener(name, () => {
      drag = null;
      frame.classList.remove("moving", "dividing");
    });
  frame.addEventListener("dblclick", (event) => {
    if (!button) return;
    const [atX, atY, roomX, roomY] = place(event);
    zoom(!actual, atX / roomX, atY / roomY, atX, atY);
  });

  range.addEventListener("input", () => divide(+range.value));
  range.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!step || !event.shiftKey || !frame.classList.contains("movable")) return;
    event.preventDefault();
    move(x + step[0] * STEP_PX, y + step[1] * STEP_PX);
  });
  if (button) button.addEventListener("click", () => zoomToDetail(!actual));

  // Keeps the same point of the image in the centre when the window size changes.
  let seen = [frame.clientWidth, frame.clientHeight];
  addEventListener("resize", () => {
    const [shareX, shareY] = [(seen[0] / 2 - x) / width, (seen[1] / 2 - y) / height];
    seen = [frame.clientWidth, frame.clientHeight];
    zoom(actual, shareX, shareY, seen[0] / 2, seen[1] / 2);
  });
  divide(+range.value);
  zoomToDetail("actual" in frame.dataset);
}

function fitToScreen() {
  document.documentElement.style.setProperty("--dpr", devicePixelRatio);
}
fitToScreen();
addEventListener("resize", fitToScreen);
document.querySelectorAll(".frame").forEach(watch);
