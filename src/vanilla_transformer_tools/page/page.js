// Draws the links between the words of a line and those of its translation.
customElements.get("word-links") || customElements.define("word-links", class extends HTMLElement {
  connectedCallback() {
    const create = name => document.createElementNS("http://www.w3.org/2000/svg", name);
    this.drawing = create("svg");
    this.append(this.drawing);
    const [source, target] = [...this.querySelectorAll("ul")].map(list => [...list.children]);
    this.links = target.flatMap(word =>
      word.dataset.links.split(" ").filter(Boolean).map(place => {
        const path = create("path");
        this.drawing.append(path);
        return { path, ends: [source[Number(place)], word] };
      }));
    for (const word of [...source, ...target]) {
      word.onpointerenter = word.onfocus = () => this.follow(word);
      word.onpointerleave = word.onblur = () => this.follow(null);
    }
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this);
  }

  disconnectedCallback() {
    this.observer.disconnect();
    this.drawing.remove();
  }

  draw() {
    const frame = this.getBoundingClientRect();
    for (const { path, ends } of this.links) {
      const [above, below] = ends.map(word => word.getBoundingClientRect());
      const [x, y] = [above.x + above.width / 2 - frame.x, above.bottom - frame.y];
      const [u, v] = [below.x + below.width / 2 - frame.x, below.top - frame.y];
      path.setAttribute("d", `M${x} ${y}C${x} ${(y + v) / 2} ${u} ${(y + v) / 2} ${u} ${v}`);
    }
  }

  follow(word) {
    this.classList.toggle("following", word !== null);
    const followed = this.links.filter(({ ends }) => ends.includes(word));
    const marked = new Set([word, ...followed.flatMap(({ path, ends }) => [path, ...ends])]);
    for (const part of this.querySelectorAll("li, path")) {
      part.classList.toggle("followed", marked.has(part));
    }
  }
});

// Gradio leaves a field that shows a result without a name, and screen readers without its news.
new MutationObserver(() => {
  document.querySelector("#vt-output textarea")?.setAttribute("aria-label", "Translation");
  document.querySelector("#vt-status")?.setAttribute("role", "status");
}).observe(document, { childList: true, subtree: true });
