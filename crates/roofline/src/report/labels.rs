//! Places for labels beside points, so that none covers another label or a point. In: points and label widths; out: a
//! place for each. NOT here: drawing.

/// A rectangle by its corners.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Area {
    /// Its left edge.
    pub left: f64,
    /// Its upper edge.
    pub top: f64,
    /// Its right edge.
    pub right: f64,
    /// Its lower edge; y grows downwards.
    pub bottom: f64,
}

impl Area {
    fn overlap(&self, other: &Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    fn inside(&self, outer: &Self) -> bool {
        self.left >= outer.left && self.right <= outer.right && self.top >= outer.top && self.bottom <= outer.bottom
    }
}

/// Half the height of a label's text, and half the width of a point with a little air.
const HALF_HEIGHT: f64 = 6.5;
const POINT: f64 = 6.0;
/// Distances of a label's near edge from its point that are tried, nearest first.
const DISTANCES: [f64; 12] = [8.0, 12.0, 18.0, 26.0, 36.0, 48.0, 64.0, 84.0, 110.0, 140.0, 180.0, 230.0];
/// Directions that are tried at each distance, as parts of a full turn: right and left first, where reading is easiest.
const DIRECTIONS: [f64; 16] =
    [0.0, 0.5, 0.0625, 0.9375, 0.4375, 0.5625, 0.125, 0.875, 0.375, 0.625, 0.1875, 0.8125, 0.3125, 0.6875, 0.25, 0.75];

/// Areas for labels of these widths at these points (x, y, width), inside `bounds` and clear of `taken`. A label for
/// which there is no free place lies right of its point all the same: it is never left out.
pub fn place(points: &[(f64, f64, f64)], bounds: Area, taken: &[Area]) -> Vec<Area> {
    let around = |x: f64, y: f64| Area { left: x - POINT, top: y - POINT, right: x + POINT, bottom: y + POINT };
    let mut taken: Vec<Area> = taken.to_vec();
    taken.extend(points.iter().map(|&(x, y, _)| around(x, y)));
    let mut placed = vec![None; points.len()];
    // From the top of the plot down, so that neighbours find their places in order.
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|&a, &b| points[a].1.total_cmp(&points[b].1));
    for i in order {
        let (x, y, width) = points[i];
        let candidates = DISTANCES.iter().flat_map(|&distance| {
            DIRECTIONS.iter().map(move |&turn| {
                let (sin, cos) = (turn * std::f64::consts::TAU).sin_cos();
                let (cx, cy) = (x + cos * (distance + width / 2.0), y + sin * (distance + HALF_HEIGHT));
                Area {
                    left: cx - width / 2.0,
                    right: cx + width / 2.0,
                    top: cy - HALF_HEIGHT,
                    bottom: cy + HALF_HEIGHT,
                }
            })
        });
        let free = |a: &Area| a.inside(&bounds) && !taken.iter().any(|t| t.overlap(a));
        let right = Area { left: x + 8.0, right: x + 8.0 + width, top: y - HALF_HEIGHT, bottom: y + HALF_HEIGHT };
        let area = candidates.into_iter().find(free).unwrap_or(right);
        taken.push(area);
        placed[i] = Some(area);
    }
    placed.into_iter().flatten().collect()
}

/// Where a line from a point to its label ends, when the label is too far away to be read as its own.
pub fn leader(x: f64, y: f64, label: &Area) -> Option<(f64, f64)> {
    let (lx, ly) = (x.clamp(label.left, label.right), y.clamp(label.top, label.bottom));
    let distance = (lx - x).hypot(ly - y);
    (distance > 14.0).then_some((lx, ly))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Area = Area { left: 0.0, top: 0.0, right: 800.0, bottom: 500.0 };

    #[test]
    fn crowded_labels_keep_clear_of_each_other_and_of_every_point() {
        let points: Vec<_> =
            (0..25).map(|i| (300.0 + f64::from(i % 5) * 30.0, 200.0 + f64::from(i) * 3.0, 70.0)).collect();
        let areas = place(&points, BOUNDS, &[]);
        assert_eq!(areas.len(), points.len());
        for (i, a) in areas.iter().enumerate() {
            assert!(a.inside(&BOUNDS), "{a:?}");
            assert!(areas[..i].iter().all(|b| !a.overlap(b)), "label {i}");
            for &(x, y, _) in &points {
                assert!(!(a.left < x && x < a.right && a.top < y && y < a.bottom), "label {i} covers a point");
            }
        }
    }

    #[test]
    fn a_lone_label_is_right_of_its_point_and_needs_no_leader() {
        let area = place(&[(100.0, 100.0, 50.0)], BOUNDS, &[])[0];
        assert_eq!(area, Area { left: 108.0, right: 158.0, top: 93.5, bottom: 106.5 });
        assert_eq!(leader(100.0, 100.0, &area), None);
        assert!(leader(50.0, 100.0, &area).is_some());
    }

    #[test]
    fn without_any_room_no_label_is_lost() {
        let nowhere = Area { left: 0.0, top: 0.0, right: 1.0, bottom: 1.0 };
        assert_eq!(place(&[(0.5, 0.5, 50.0), (0.5, 0.5, 50.0)], nowhere, &[]).len(), 2);
    }
}
