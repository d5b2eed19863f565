// Text in the article whose contrast, as computed from the colours that the browser really uses, is below WCAG's AA.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const luminance = (colour) =>
    [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
      const channel = colour[i] / 255;
      return sum + weight * (channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4);
    }, 0);
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };

  const poor = [];
  const seen = new Set();
  const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    // Pictures are checked by their variables in test_docs.py; the paragraph signs appear on hover only.
    if (!text || element.closest("svg, script, style, .headerlink") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const under = background(element);
    const key = [style.color, under, style.fontSize, style.fontWeight].join();
    if (seen.has(key)) continue;
    seen.add(key);
    const size = parseFloat(style.fontSize);
    const wanted = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const [low, high] = [luminance(over(rgba(style.color), under)), luminance(under)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < wanted) {
      poor.push(`${ratio.toFixed(2)}: "${text.slice(0, 40)}" in ${style.color} on ${under} (${element.tagName}.${element.className})`);
    }
  }
  return poor;
}
