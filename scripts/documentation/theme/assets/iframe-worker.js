// Pages that are opened as files cannot start a Worker. This one runs the search in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === inner) {
          const answer = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(answer);
          this.onmessage?.(answer);
        }
      });
      inner.document.open();
      inner.document.write(`<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          document.body.append(script);
        })), Promise.resolve());
      </script><body><script src="${url}"></script></body>`);
      inner.document.close();
      this.ready = new Promise((resolve) => (inner.onload = resolve));
    }
    postMessage(data) {
      const frame = this.frame.contentWindow;
      this.ready.then(() => frame.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
