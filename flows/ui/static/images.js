/* The images of a trajectory: small in a list, whole beside its tokens, and as chips in place of their tokens. */

import {make} from "ui/dom";
import {source} from "ui/source";

const PATCHES = /(<\|?[\w-]*(?:image|img|patch)[\w-]*\|?>|\[IMG\])(?:\s*\1)+/gi;

/** A text of a list, with each run of the same token of an image as one. */
export const short = text => text.replace(PATCHES, "▣");

/** The first images of a line of a list, small; none if it has none. */
export function thumbnails({images, more_images: more}, run) {
  if (!images.length) return [];
  const shown = images.map((digest, index) => {
    const address = source.image(run, digest, true);
    return address === null ? null : make("img", {src: address, alt: `image ${index + 1}`, loading: "lazy"});
  }).filter(image => image !== null);
  for (const image of shown) image.onerror = () => image.replaceWith(make("span", {className: "dim"}, "no image"));
  const left = more + images.length - shown.length;
  return [make("div", {className: "thumbnails"}, ...shown, ...(left ? [make("span", {className: "dim"}, `+ ${left}`)] : []))];
}

/** All images of a trajectory, numbered, with what each is. */
export function figures(images, run) {
  return make("div", {className: "images"}, ...images.map((image, index) => {
    const address = image.is_shown ? source.image(run, image.digest) : null;
    const caption = make("figcaption", {className: "dim"}, `image ${index + 1} · ${image.told}`);
    const figure = make("figure", {"data-image": index}, caption);
    if (address === null) {
      if (image.is_shown) caption.append(" · left out of this report");
      else caption.setAttribute("role", "alert");
      return figure;
    }
    const shown = make("img", {src: address, alt: `image ${index + 1}`});
    figure.prepend(source.live ? make("a", {href: address, target: "_blank", rel: "noopener", title: "open the image alone"}, shown) : shown);
    return figure;
  }));
}

/** What stands for an image among the tokens of a reader. A click shows the image. */
export function chip(reader, image, tokens) {
  const name = image === null ? "image" : `image ${image + 1}`;
  const element = make("button", {type: "button", className: "chip", title: "the image that these tokens stand for"},
    tokens > 1 ? `${name} · ${tokens} tokens` : name);
  element.onclick = () => {
    const figure = reader.querySelector(image === null ? ".images" : `[data-image="${image}"]`);
    figure?.scrollIntoView({block: "nearest"});
    figure?.animate?.([{outline: "3px solid var(--focus)"}, {outline: "3px solid transparent"}], 900);
  };
  return element;
}
