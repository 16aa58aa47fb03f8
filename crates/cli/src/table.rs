//! Aligned tables for terminals. In: column names and cells; out: text, columns two spaces apart. NOT here: JSON.

/// Where a column's cells stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Names and texts.
    Left,
    /// Numbers.
    Right,
}

/// A table being filled.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table of these columns.
    pub fn new<const N: usize>(columns: [(&str, Align); N]) -> Self {
        Self::with_columns(columns.map(|(name, align)| (name.to_string(), align)).to_vec())
    }

    /// A table whose columns are known only at run time.
    pub fn with_columns(columns: Vec<(String, Align)>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; cells beyond the columns are left out, missing ones are empty.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// The text, with a line of dashes under the names and no spaces at line ends.
    pub fn render(&self) -> String {
        let width = |i: usize| {
            let cells = self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count());
            cells.chain([self.columns[i].0.chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |cells: Vec<&str>| {
            let cells = cells.iter().zip(&self.columns).zip(&widths).map(|((cell, (_, align)), &w)| match align {
                Align::Left => format!("{cell:<w$}"),
                Align::Right => format!("{cell:>w$}"),
            });
            format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
        };
        let mut text = line(self.columns.iter().map(|(name, _)| name.as_str()).collect());
        text += &line(widths.iter().map(|w| "-".repeat(*w)).collect::<Vec<_>>().iter().map(String::as_str).collect());
        for row in &self.rows {
            let cells = (0..self.columns.len()).map(|i| row.get(i).map_or("", String::as_str));
            text += &line(cells.collect());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new([("scheme", Align::Left), ("bytes", Align::Right)]);
        t.row(["f16".into(), "1234567".into()]);
        t.row(["k4v4g64w128".into(), "9".into()]);
        assert_eq!(
            t.render(),
            "scheme         bytes\n-----------  -------\nf16          1234567\nk4v4g64w128        9\n"
        );
    }
}
