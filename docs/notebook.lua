-- From reStructuredText to what a notebook's Markdown cell shows, for sphinx-gallery's pandoc.

-- :class:`~torchrl.data.ReplayBuffer` reads as `ReplayBuffer`.
function Code(code)
  return pandoc.Code(code.text:match("^~.*%.([^.]+)$") or code.text:match("^~(.+)$") or code.text)
end

-- Each cell is converted by itself, so the level of a heading must come from its title.
function Header(header)
  local title = pandoc.utils.stringify(header)
  local level = title:match("^%d%.%d ") and 3
    or (title:match("^Part %d") or title == "Conclusion") and 2 or 1
  return pandoc.Header(level, header.content)
end

-- Cards and admonitions become quotations under a bold title, a grid just its cards.
function Div(div)
  local title = div.content[1]
  local body = { table.unpack(div.content, 2) }
  if div.classes:includes("grid") then
    return body
  elseif div.classes:includes("grid-item-card") or div.classes:includes("admonition") then
    return pandoc.BlockQuote({ pandoc.Para({ pandoc.Strong(title.content) }), table.unpack(body) })
  end
end

-- The notebook must be one file: pictures of the site go into it.
function Image(image)
  local path = image.src:match("^/(.*)")
  if path then
    local file = assert(io.open(PANDOC_SCRIPT_FILE:match("^(.*)/") .. "/" .. path, "rb"))
    image.src = pandoc.mediabag.make_data_uri("image/svg+xml", file:read("a"))
    file:close()
  end
  return image
end

-- A picture's description stays, its caption follows as a line of its own.
function Figure(figure)
  return { figure.content[1], table.unpack(figure.caption.long) }
end
