"""Faults of a page in a browser: text of low contrast, images without alternative text, horizontal scrolling."""

from __future__ import annotations

from typing import Any

FAULTS = r"""() => {
  const colour = text => {
    const [r, g, b, a = 1] = text.match(/[\d.e-]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = (upper, lower) => [0, 1, 2].map(i => upper[i] * upper[3] + lower[i] * (1 - upper[3]));
  const luminance = rgb => {
    const [r, g, b] = rgb.map(value => value / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const contrast = (text, style) => {
    let opacity = 1, layers = [];
    for (let node = text; node; node = node.parentElement) {
      const own = getComputedStyle(node), background = colour(own.backgroundColor);
      opacity *= own.opacity;
      if (!layers.some(layer => layer[3] === 1)) layers.push(background);
    }
    const paper = layers.reverse().reduce((lower, upper) => over(upper, lower), [255, 255, 255]);
    const ink = colour(text.closest("svg") ? style.fill : style.color);
    const both = [luminance(over([...ink.slice(0, 3), ink[3] * opacity], paper)), luminance(paper)].sort();
    return opacity < .05 ? 21 : (Math.max(...both) + .05) / (Math.min(...both) + .05);
  };
  const faults = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.parentElement, range = document.createRange();
    range.selectNodeContents(node);
    const style = getComputedStyle(text), size = parseFloat(style.fontSize), box = range.getBoundingClientRect();
    if (!node.textContent.trim() || box.width < 1 || box.height < 1 || style.visibility === "hidden") continue;
    const least = size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5, found = contrast(text, style);
    if (found < least) faults.add(`contrast ${found.toFixed(2)}: ${text.className} ${node.textContent.slice(0, 40)}`);
  }
  const bare = [...document.images].filter(image => !image.alt.trim() && !image.closest("button, a"));
  for (const image of bare) faults.add(`no alternative text: ${image.src.slice(0, 80)}`);
  if (document.documentElement.scrollWidth > innerWidth) faults.add("scrolls horizontally");
  return [...faults];
}"""
"""Least contrasts of WCAG 2 AA: 4.5, and 3 for large text."""


def faults(page: Any) -> list[str]:
    """Return the faults of a playwright page in the theme that it is shown in."""
    return page.evaluate(FAULTS)
