"""The only room that knows SQLite: schema, packing of histograms, writer, reader."""
